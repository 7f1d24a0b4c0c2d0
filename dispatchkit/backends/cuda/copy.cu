// The kernel of a copy node. It copies the inputs of a graph to the graph's static buffers, and
// writes fill after the rows. copy.py loads copy.ptx, which scripts/copy_kernel.py generates.

#define MAX_REGIONS 16
#define CAPACITY 29696  // maximum bytes of host data; copy.py also loads smaller capacities

typedef unsigned long long Address;

struct Work {  // the layout of Work in copy.py; blockIdx.y is the index of the input
    Address sources[MAX_REGIONS], targets[MAX_REGIONS], fills[MAX_REGIONS];
    unsigned num_bytes[MAX_REGIONS], tail_bytes[MAX_REGIONS];
};

struct __align__(16) Data {
    unsigned char bytes[CAPACITY];
};

// A loop over the words of an input, distributed over all threads of the input.
#define WORDS(Word, num_bytes) \
    _Pragma("unroll 1") \
    for (unsigned at = first * sizeof(Word); at < num_bytes; at += all * sizeof(Word))
#define COPY(Word) WORDS(Word, size) *(Word*)(target + at) = *(const Word*)(source + at)
#define FILL(Word) WORDS(Word, tail) *(Word*)(target + at) = (Word)(fill >> (at % 8 * 8))

extern "C" __global__ void dispatchkit_copy(const __grid_constant__ Work work,
                                            const __grid_constant__ Data data) {
    const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
    const unsigned size = work.num_bytes[blockIdx.y], tail = work.tail_bytes[blockIdx.y];
    const Address fill = work.fills[blockIdx.y];
    Address source = work.sources[blockIdx.y], target = work.targets[blockIdx.y];
    if (source != target) {                                    // otherwise, the rows are in place
        if (source < CAPACITY) source += (Address)data.bytes;  // an offset into the host data
        const Address widths = source | target | size;
        if (widths % 16 == 0) COPY(uint4);
        else if (widths % 8 == 0) COPY(Address);
        else if (widths % 4 == 0) COPY(unsigned);
        else if (widths % 2 == 0) COPY(unsigned short);
        else COPY(unsigned char);
    }
    target += size;
    const Address widths = target | tail;
    if (widths % 8 == 0) FILL(Address);
    else if (widths % 4 == 0) FILL(unsigned);
    else if (widths % 2 == 0) FILL(unsigned short);
    else FILL(unsigned char);
}
