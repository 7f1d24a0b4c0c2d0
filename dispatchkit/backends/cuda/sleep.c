/* An allocator of device memory that can release physical memory and keep its addresses.
 *
 * dispatchkit_allocate and dispatchkit_free are the allocator of a torch MemPool
 * (torch.cuda.memory.CUDAPluggableAllocator). They must not call Python: torch calls them while it
 * holds the lock of its allocator, and a thread that holds the GIL may be waiting for this lock.
 *
 * sleeping.py passes the driver's functions as a table, so this file compiles without the headers
 * of CUDA and links only against libc.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef int Result;
typedef unsigned long long Address;
typedef unsigned long long Handle;

typedef struct {
    int type;
    int id;
} Location;

/* CUmemAllocationProp and CUmemAccessDesc of cuda.h, unchanged since CUDA 10.2. */
typedef struct {
    int type;
    int handle_types;
    Location location;
    void *win32;
    unsigned char flags[8];
} Properties;

typedef struct {
    Location location;
    int flags;
} Access;

enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, RELAXED = 2, NOT_FOUND = 500 };

typedef struct {
    Result (*reserve)(Address *, size_t, size_t, Address, unsigned long long);
    Result (*release_addresses)(Address, size_t);
    Result (*create)(Handle *, size_t, const Properties *, unsigned long long);
    Result (*release)(Handle);
    Result (*map)(Address, size_t, size_t, Handle, unsigned long long);
    Result (*unmap)(Address, size_t);
    Result (*set_access)(Address, size_t, const Access *, size_t);
    Result (*granularity)(size_t *, const Properties *, int);
    Result (*current_context)(void **);
    Result (*set_context)(void *);
    Result (*primary_context)(void **, int);
    Result (*exchange_mode)(int *);
} Driver;

typedef struct Segment {
    struct Segment *next;
    Address address;
    size_t size;
    int device;
    int is_mapped;
    Handle handle;
} Segment;

static Driver driver;
static Segment *segments;
static int lock;

static void acquire(void) {
    while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) {
    }
}

static void release(void) { __atomic_store_n(&lock, 0, __ATOMIC_RELEASE); }

/* Make a context current, which driver calls require, and set a relaxed capture mode. */
static Result enter(int device, int *mode) {
    void *context = NULL;
    Result code = driver.current_context(&context);
    if (code == 0 && context == NULL) {
        code = driver.primary_context(&context, device);
        if (code == 0) code = driver.set_context(context);
    }
    /* Segments may be allocated during captures. */
    *mode = RELAXED;
    if (code == 0) code = driver.exchange_mode(mode);
    return code;
}

static void leave(int mode) { driver.exchange_mode(&mode); }

static Properties properties_of(int device) {
    Properties properties = {PINNED, 0, {ON_DEVICE, device}, NULL, {0}};
    return properties;
}

static Result map_segment(Segment *one) {
    Properties properties = properties_of(one->device);
    Access access = {{ON_DEVICE, one->device}, READ_WRITE};
    Result code = driver.create(&one->handle, one->size, &properties, 0);
    if (code != 0) return code;
    code = driver.map(one->address, one->size, 0, one->handle, 0);
    if (code == 0) {
        code = driver.set_access(one->address, one->size, &access, 1);
        if (code == 0) {
            one->is_mapped = 1;
            return 0;
        }
        driver.unmap(one->address, one->size);
    }
    driver.release(one->handle);
    return code;
}

static Result unmap_segment(Segment *one) {
    Result code = driver.unmap(one->address, one->size);
    if (code != 0) return code;
    one->is_mapped = 0;
    return driver.release(one->handle);
}

/* Store the driver's functions, in the order of Driver; must be called before all other calls. */
void dispatchkit_set_driver(void **functions) { driver = *(Driver *)functions; }

void *dispatchkit_allocate(ptrdiff_t size, int device, void *stream) {
    (void)stream;
    int mode;
    if (enter(device, &mode) != 0) return NULL;
    Properties properties = properties_of(device);
    size_t step = 0;
    Segment *one = calloc(1, sizeof(Segment));
    if (one != NULL && driver.granularity(&step, &properties, 0) == 0 && step > 0) {
        one->device = device;
        one->size = ((size_t)size + step - 1) / step * step;
        if (driver.reserve(&one->address, one->size, 0, 0, 0) == 0) {
            if (map_segment(one) == 0) {
                leave(mode);
                acquire();
                one->next = segments;
                segments = one;
                release();
                return (void *)(uintptr_t)one->address;
            }
            driver.release_addresses(one->address, one->size);
        }
    }
    free(one);
    leave(mode);
    return NULL;
}

void dispatchkit_free(void *pointer, size_t size, int device, void *stream) {
    (void)size;
    (void)stream;
    Segment *one = NULL;
    acquire();
    for (Segment **at = &segments; *at != NULL; at = &(*at)->next) {
        if ((*at)->address == (Address)(uintptr_t)pointer) {
            one = *at;
            *at = one->next;
            break;
        }
    }
    release();
    int mode;
    if (one == NULL || enter(device, &mode) != 0) return;
    if (one->is_mapped) unmap_segment(one);
    driver.release_addresses(one->address, one->size);
    leave(mode);
    free(one);
}

/* Map or unmap the segment at an address, which must not be freed during the call.
 *
 * Returns the driver's error code, or 0 for success. After an error, the segment is unchanged. */
Result dispatchkit_set_mapped(Address address, int wanted) {
    Segment *one;
    acquire();
    for (one = segments; one != NULL && one->address != address; one = one->next) {
    }
    release();
    if (one == NULL) return NOT_FOUND;
    if (one->is_mapped == wanted) return 0;
    int mode;
    Result code = enter(one->device, &mode);
    if (code != 0) return code;
    code = wanted ? map_segment(one) : unmap_segment(one);
    leave(mode);
    return code;
}
