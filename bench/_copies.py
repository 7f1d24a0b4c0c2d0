"""Measure ways to copy device inputs to a graph's static memory and launch the graph.

Each way is measured as a complete step: it reads the addresses of new inputs, copies the inputs and
launches the graph. The result is verified. If this machine, torch or CUDA does not support a way,
its line contains the reason, and the other ways are still measured. The riskiest ways come last,
because a kernel that reads an invalid address would end the process.

Sources: CUDA Runtime API and CUDA Driver API of CUDA 13, "Memory Management", "Execution Control"
    and "Graph Management". In CUDA 12, the batched copy has one more argument.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from _common import emit

from dispatchkit.backends.cuda import copy as cuda_copy
from dispatchkit.backends.cuda.copy import LaunchConfig, NodeParams

BENCH = "floors"
ROWS, ROOM = 200, 512
COUNTS = (1, 3, 8)
#: Handle of the per-thread default stream.
PER_THREAD = 2
DEVICE_TO_DEVICE = 3
MAX_INPUTS = 8

V, SIZE = ctypes.c_void_p, ctypes.c_size_t
Step = Callable[[Sequence[torch.Tensor]], None]

KERNEL = """
struct Work {
    const char* from[8];
    char* to[8];
    unsigned bytes[8];
};

extern "C" __global__ void copy_all(const __grid_constant__ Work work) {
    const char* from = work.from[blockIdx.x];
    char* to = work.to[blockIdx.x];
    const unsigned bytes = work.bytes[blockIdx.x];
    const unsigned long long both = (unsigned long long)from | (unsigned long long)to | bytes;
    if ((both & 7) == 0) {
        for (unsigned at = threadIdx.x * 8; at < bytes; at += blockDim.x * 8)
            *(long long*)(to + at) = *(const long long*)(from + at);
    } else {
        for (unsigned at = threadIdx.x; at < bytes; at += blockDim.x) to[at] = from[at];
    }
}
"""


class Work(ctypes.Structure):
    """Argument of the kernel ``copy_all``."""

    _fields_ = (
        ("source", V * MAX_INPUTS),
        ("target", V * MAX_INPUTS),
        ("bytes", ctypes.c_uint * MAX_INPUTS),
    )


class CopyNode(ctypes.Structure):
    """cudaMemcpy3DParms, of which only the target address is read."""

    _fields_ = (
        ("source_array", V),
        ("source_at", SIZE * 3),
        ("source", V),
        ("source_pitch", SIZE * 3),
        ("target_array", V),
        ("target_at", SIZE * 3),
        ("target", V),
        ("target_pitch", SIZE * 3),
        ("extent", SIZE * 3),
        ("kind", ctypes.c_int),
    )


def runtime() -> ctypes.CDLL:
    """Return the CUDA runtime library loaded by torch."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")


def driver() -> ctypes.CDLL:
    """Return the CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


def call_of(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., int]:
    """Return a function of a library with its argument types set."""
    found = library[name]
    found.argtypes, found.restype = arguments, ctypes.c_int
    return found


def check_cuda(code: int) -> None:
    """Raise if a CUDA call failed."""
    if code:
        raise RuntimeError(f"CUDA error {code}")


def captured(body: Callable[[], None]) -> tuple[Any, V]:
    """Capture a function; return the graph and the handle of its executable."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        body()
    graph.instantiate()
    return graph, V(int(graph.raw_cuda_graph_exec()))


def compiler() -> ctypes.CDLL:
    """Return NVRTC, a dependency of torch."""
    major = str(torch.version.cuda).split(".")[0]
    packages = Path(sysconfig.get_paths()["purelib"])
    places = [f"libnvrtc.so.{major}", *packages.glob(f"nvidia/*/lib/libnvrtc.so.{major}")]
    for place in packages.glob("nvidia/*/lib/libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(place))  # NVRTC finds its builtins by name only if they are loaded
    for place in places:
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    raise RuntimeError(f"libnvrtc.so.{major} was not found")


def compiled() -> V:
    """Compile the kernel ``copy_all``; return it as a driver function."""
    return loaded(cubin(compiler(), KERNEL), b"copy_all")


def loaded(code: bytes, name: bytes) -> V:
    """Return a driver function loaded from PTX or from device code."""
    module, function = V(), V()
    check_cuda(driver().cuModuleLoadData(ctypes.byref(module), code))
    check_cuda(driver().cuModuleGetFunction(ctypes.byref(function), module, name))
    return function


def cubin(library: ctypes.CDLL, source: str) -> bytes:
    """Compile a kernel for this device; return its device code."""
    program = V()
    made = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k", 0, None, None)
    check_cuda(made)
    architecture = "".join(map(str, torch.cuda.get_device_capability()))
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{architecture}".encode())
    if library.nvrtcCompileProgram(program, 1, options):
        size = SIZE()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    size = SIZE()
    check_cuda(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    check_cuda(library.nvrtcGetCUBIN(program, code))
    return code.raw


def measure_kernel_loading() -> None:
    """Measure the time to load the package's kernel from PTX, and to compile it with NVRTC.

    The package loads PTX. With CUDA_CACHE_DISABLE=1, the driver compiles the PTX each time, as in
    the first process on a machine.
    """
    torch.cuda.synchronize()
    source = Path(cuda_copy.__file__).with_name("copy.cu").read_text()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = perf_counter_ns()
        try:
            result = call()
        except RuntimeError as error:
            emit(BENCH, name, 0, "ms", 1, group="kernel", failed=str(error)[:200])
            return None
        took = (perf_counter_ns() - start) / 1e6
        cache = "off" if os.environ.get("CUDA_CACHE_DISABLE") == "1" else "on"
        emit(BENCH, name, took, "ms", 1, group="kernel", driver_cache=cache)
        return result

    for capacity in cuda_copy.CAPACITIES:
        text = cuda_copy.kernel_text(capacity).encode()
        name = f"load PTX with {capacity} bytes of data"
        timed(name, lambda text=text: loaded(text, b"dispatchkit_copy"))
    library = timed("load the NVRTC library", compiler)
    if library is None:
        return
    for capacity in cuda_copy.CAPACITIES:
        given = source.replace(str(cuda_copy.CAPACITIES[-1]), str(capacity))
        name = f"compile with NVRTC and load, {capacity} bytes of data"
        timed(name, lambda given=given: loaded(cubin(library, given), b"dispatchkit_copy"))


class Inputs:
    """Two sets of ``count`` int64 inputs, and a graph that sums one set."""

    def __init__(self, count: int) -> None:
        self.count, self.num_bytes = count, ROWS * 8
        self.sets = [
            [torch.randint(1, 99, (ROWS,), device="cuda") for _ in range(count)] for _ in range(2)
        ]
        self.expected = [torch.stack(given).sum(0) for given in self.sets]
        self.static = [torch.zeros(ROOM, dtype=torch.int64, device="cuda") for _ in range(count)]
        self.views = [static[:ROWS] for static in self.static]
        self.places = [view.data_ptr() for view in self.views]
        self.out = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.graph, self.exec = captured(self.body)
        self.run = call_of(runtime(), "cudaGraphLaunch", V, V)

    def body(self) -> None:
        """Sum all inputs. The graph consists of these operations."""
        self.out.zero_()
        for view in self.views:
            self.out.add_(view)

    def verify(self, step: Step) -> None:
        """Raise if the step returns incorrect results for either set."""
        for given, expected in zip(self.sets, self.expected, strict=True):
            for static in self.static:
                static.fill_(-1)
            torch.cuda.synchronize()
            step(given)
            torch.cuda.synchronize()
            if not torch.equal(self.out, expected):
                raise RuntimeError("the step returned a wrong result")

    # -- with torch ---------------------------------------------------------------------

    def launch_alone(self, stream: V | None = None) -> Step:
        """Return a step that only launches the graph."""
        run, graph = self.run, self.exec
        return lambda _: run(graph, stream)

    def fused(self, stream: V | None = None) -> Step:
        """Return a step with one fused copy of all inputs."""
        run, graph, views, copy = self.run, self.exec, self.views, torch._foreach_copy_

        def step(values: Sequence[torch.Tensor]) -> None:
            copy(views, values)
            check_cuda(run(graph, stream))

        return step

    def one_by_one(self) -> Step:
        """Return a step with one ``copy_`` per input."""
        run, graph, views = self.run, self.exec, self.views

        def step(values: Sequence[torch.Tensor]) -> None:
            for view, value in zip(views, values, strict=True):
                view.copy_(value)
            check_cuda(run(graph, None))

        return step

    # -- with the runtime and the driver --------------------------------------------------

    def runtime_each(self) -> Step:
        """Return a step with one cudaMemcpyAsync per input."""
        copy = call_of(runtime(), "cudaMemcpyAsync", V, V, SIZE, ctypes.c_int, V)
        places = [V(place) for place in self.places]
        size, kind = SIZE(self.num_bytes), ctypes.c_int(DEVICE_TO_DEVICE)
        run, graph = self.run, self.exec

        def step(values: Sequence[torch.Tensor]) -> None:
            for place, value in zip(places, values):  # noqa: B905 - strict=True costs more
                check_cuda(copy(place, value.data_ptr(), size, kind, None))
            check_cuda(run(graph, None))

        return step

    def driver_each(self) -> Step:
        """Return a step with one cuMemcpyDtoDAsync per input."""
        copy = call_of(driver(), "cuMemcpyDtoDAsync_v2", ctypes.c_uint64, ctypes.c_uint64, SIZE, V)
        places = [ctypes.c_uint64(place) for place in self.places]
        run, graph, size = self.run, self.exec, SIZE(self.num_bytes)

        def step(values: Sequence[torch.Tensor]) -> None:
            for place, value in zip(places, values):  # noqa: B905
                check_cuda(copy(place, value.data_ptr(), size, None))
            check_cuda(run(graph, None))

        return step

    def batched(self, copy_stream: V | None, launch_stream: V | None) -> Step:
        """Return a step with one cudaMemcpyBatchAsync for all inputs."""
        count = self.count
        targets, sources = (V * count)(*self.places), (V * count)()
        sizes = (SIZE * count)(*[self.num_bytes] * count)
        attributes = (ctypes.c_int * 16)(1)  # sources are read in stream order
        first, fail = (SIZE * 1)(0), (SIZE * 1)()
        arguments: list[Any] = [V, V, V, SIZE, V, V, SIZE, V]
        fixed = [V(ctypes.addressof(targets)), V(ctypes.addressof(sources))]
        fixed += [V(ctypes.addressof(sizes)), SIZE(count), V(ctypes.addressof(attributes))]
        fixed += [V(ctypes.addressof(first)), SIZE(1)]
        if str(torch.version.cuda).startswith("12"):
            arguments.append(V)
            fixed.append(V(ctypes.addressof(fail)))
        copy = call_of(runtime(), "cudaMemcpyBatchAsync", *arguments)
        run, graph, kept = self.run, self.exec, (targets, sizes, attributes, first, fail)

        def step(values: Sequence[torch.Tensor], _: Any = kept) -> None:
            sources[:] = [value.data_ptr() for value in values]
            check_cuda(copy(*fixed, copy_stream))
            check_cuda(run(graph, launch_stream))

        return step

    # -- with cuda-bindings --------------------------------------------------------------

    def bindings_launch(self) -> Step:
        """Return a bare launch through the runtime API of cuda-bindings."""
        from cuda.bindings import runtime as bindings

        graph = bindings.cudaGraphExec_t(self.exec.value)
        stream, run = bindings.cudaStream_t(0), bindings.cudaGraphLaunch
        return lambda _: run(graph, stream)

    def bindings_driver_launch(self) -> Step:
        """Return a bare launch through the driver API of cuda-bindings."""
        from cuda.bindings import driver as bindings

        graph, stream = bindings.CUgraphExec(self.exec.value), bindings.CUstream(0)
        run = bindings.cuGraphLaunch
        return lambda _: run(graph, stream)

    def bindings_each(self) -> Step:
        """Return a step with one cudaMemcpyAsync of cuda-bindings per input."""
        from cuda.bindings import runtime as bindings

        graph = bindings.cudaGraphExec_t(self.exec.value)
        stream, run, copy = bindings.cudaStream_t(0), bindings.cudaGraphLaunch, None
        copy, places, size = bindings.cudaMemcpyAsync, self.places, self.num_bytes
        kind = bindings.cudaMemcpyKind.cudaMemcpyDeviceToDevice

        def step(values: Sequence[torch.Tensor]) -> None:
            for place, value in zip(places, values):  # noqa: B905
                check_cuda(copy(place, value.data_ptr(), size, kind, stream)[0])
            check_cuda(run(graph, stream)[0])

        return step

    def bindings_driver_each(self) -> Step:
        """Return a step with one cuMemcpyDtoDAsync of cuda-bindings per input."""
        from cuda.bindings import driver as bindings

        graph, stream = bindings.CUgraphExec(self.exec.value), bindings.CUstream(0)
        places = [bindings.CUdeviceptr(place) for place in self.places]
        run, copy, size = bindings.cuGraphLaunch, bindings.cuMemcpyDtoDAsync, self.num_bytes

        def step(values: Sequence[torch.Tensor]) -> None:
            for place, value in zip(places, values):  # noqa: B905
                check_cuda(copy(place, value.data_ptr(), size, stream)[0])
            check_cuda(run(graph, stream)[0])

        return step

    # -- nodes of the graph, and a custom kernel ---------------------------------------------

    def copy_nodes(self) -> Step:
        """Return a step that sets the sources of the graph's copy nodes, then launches it."""
        library, first = runtime(), self.sets[0]

        def body() -> None:
            for view, value in zip(self.views, first, strict=True):
                view.copy_(value)
            self.body()

        graph, handle = captured(body)
        nodes = self._copies_of(library, int(graph.raw_cuda_graph()))
        change = call_of(
            library, "cudaGraphExecMemcpyNodeSetParams1D", V, V, V, V, SIZE, ctypes.c_int
        )
        targets = [(nodes[place], V(place)) for place in self.places]
        run, size, kind = self.run, SIZE(self.num_bytes), ctypes.c_int(DEVICE_TO_DEVICE)

        def step(values: Sequence[torch.Tensor], _: Any = graph) -> None:
            for (node, place), value in zip(targets, values):  # noqa: B905
                check_cuda(change(handle, node, place, value.data_ptr(), size, kind))
            check_cuda(run(handle, None))

        return step

    def _copies_of(self, library: ctypes.CDLL, graph: int) -> dict[int, V]:
        """Return the memcpy nodes of a graph by target address."""
        count, found = SIZE(), {}
        check_cuda(library.cudaGraphGetNodes(V(graph), None, ctypes.byref(count)))
        nodes = (V * count.value)()
        check_cuda(library.cudaGraphGetNodes(V(graph), nodes, ctypes.byref(count)))
        for node in nodes:
            kind, what = ctypes.c_int(), CopyNode()
            check_cuda(library.cudaGraphNodeGetType(V(node), ctypes.byref(kind)))
            if kind.value == 1:
                check_cuda(library.cudaGraphMemcpyNodeGetParams(V(node), ctypes.byref(what)))
                found[what.target] = V(node)
        missing = set(self.places) - set(found)
        if missing:
            raise RuntimeError(f"the graph has no memcpy node for {len(missing)} of the inputs")
        return found

    def _work(self) -> tuple[Work, Any]:
        work = Work()
        for index, place in enumerate(self.places):
            work.target[index], work.bytes[index] = place, self.num_bytes
        for index, value in enumerate(self.sets[0]):
            work.source[index] = value.data_ptr()
        return work, (V * 1)(ctypes.addressof(work))

    def kernel(self, function: V) -> Step:
        """Return a step in which one kernel, launched before the graph, copies all inputs."""
        work, params = self._work()
        config = LaunchConfig((self.count, 1, 1), (256, 1, 1))
        launch = call_of(driver(), "cuLaunchKernelEx", V, V, V, V)
        at, arguments = V(ctypes.addressof(config)), V(ctypes.addressof(params))
        run, graph, source, kept = self.run, self.exec, work.source, (work, params, config)

        def step(values: Sequence[torch.Tensor], _: Any = kept) -> None:
            for index, value in enumerate(values):
                source[index] = value.data_ptr()
            check_cuda(launch(at, function, arguments, None))
            check_cuda(run(graph, None))

        return step

    def kernel_node(self, function: V) -> Step:
        """Return a step that launches a graph whose first node, a kernel, copies all inputs."""
        work, params = self._work()
        config = LaunchConfig((self.count, 1, 1), (256, 1, 1))
        launch = call_of(driver(), "cuLaunchKernelEx", V, V, V, V)

        def body() -> None:
            config.stream = torch.cuda.current_stream().cuda_stream
            check_cuda(launch(ctypes.addressof(config), function, ctypes.addressof(params), None))
            self.body()

        graph, handle = captured(body)
        root, count = V(), SIZE(1)
        check_cuda(
            runtime().cudaGraphGetRootNodes(
                V(int(graph.raw_cuda_graph())), ctypes.byref(root), ctypes.byref(count)
            )
        )
        kind = ctypes.c_int()
        check_cuda(runtime().cudaGraphNodeGetType(root, ctypes.byref(kind)))
        if count.value != 1 or kind.value != 0:
            raise RuntimeError("the first node of the graph is not the kernel")
        node = NodeParams(function, (self.count, 1, 1), (256, 1, 1))
        node.params = ctypes.addressof(params)
        change = call_of(driver(), "cuGraphExecKernelNodeSetParams_v2", V, V, V)
        at, run, source = V(ctypes.addressof(node)), self.run, work.source
        kept = (graph, work, params, node)

        def step(values: Sequence[torch.Tensor], _: Any = kept) -> None:
            for index, value in enumerate(values):
                source[index] = value.data_ptr()
            check_cuda(change(handle, root, at))
            check_cuda(run(handle, None))

        return step


def measure(name: str, group: str, inputs: Inputs, make: Callable[[], Step], rounds: int) -> None:
    """Print the host time of a step, or the reason for its failure."""
    try:
        step = make()
        if "alone" not in name:
            inputs.verify(step)
        samples = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            start = perf_counter_ns()
            for _ in range(20):
                step(inputs.sets[0])
                step(inputs.sets[1])
            samples.append((perf_counter_ns() - start) / 40 / 1000)
        torch.cuda.synchronize()
        if "alone" not in name:
            inputs.verify(step)
    except Exception as error:  # noqa: BLE001 - one failing way must not stop the others
        what = f"{type(error).__name__}: {error}"
        emit(BENCH, name, 0, "us", 0, group=group, failed=what[:300])
        runtime().cudaGetLastError()  # clears the error, which torch would report later
        return
    median, best = statistics.median(samples[1:]), round(min(samples[1:]), 2)
    emit(BENCH, name, median, "us", rounds, group=group, best=best)


def copies_and_launch(rounds: int) -> None:
    """Measure all ways to copy and launch, for each number of inputs."""
    side = torch.cuda.Stream()
    stream = V(side.cuda_stream)
    try:
        function, problem = compiled(), ""
    except Exception as error:  # noqa: BLE001 - reported when the kernel is measured
        function, problem = V(), f"{type(error).__name__}: {error}"

    def with_kernel(make: Callable[[V], Step]) -> Step:
        if problem:
            raise RuntimeError(problem)
        return make(function)

    for count in COUNTS:
        inputs, group = Inputs(count), f"{count} inputs and the launch"

        def measure_case(
            name: str, make: Callable[[], Step], i: Any = inputs, g: str = group
        ) -> None:
            measure(name, g, i, make, rounds)

        measure_case("launch alone, ctypes", inputs.launch_alone)
        measure_case("launch alone, cuda-bindings", inputs.bindings_launch)
        measure_case("launch alone, cuda-bindings, driver", inputs.bindings_driver_launch)
        measure_case("one fused copy", inputs.fused)
        measure_case("one copy_ per input", inputs.one_by_one)
        measure_case("one cudaMemcpyAsync per input", inputs.runtime_each)
        measure_case("one cuMemcpyDtoDAsync per input", inputs.driver_each)
        measure_case("cuda-bindings, one cudaMemcpyAsync per input", inputs.bindings_each)
        measure_case("cuda-bindings, one cuMemcpyDtoDAsync per input", inputs.bindings_driver_each)
        with torch.cuda.stream(side):
            measure_case("one fused copy, own stream", lambda i=inputs: i.fused(stream))
            measure_case(
                "cudaMemcpyBatchAsync, own stream", lambda i=inputs: i.batched(stream, stream)
            )
        measure_case("cudaMemcpyBatchAsync, default stream", lambda i=inputs: i.batched(None, None))
        measure_case(
            "cudaMemcpyBatchAsync on the per-thread stream, launch on the default stream",
            lambda i=inputs: i.batched(V(PER_THREAD), None),
        )
        measure_case("graph with one memcpy node per input", inputs.copy_nodes)
        measure_case("one kernel before the graph", lambda i=inputs: with_kernel(i.kernel))
        measure_case(
            "graph with one kernel node for all inputs", lambda i=inputs: with_kernel(i.kernel_node)
        )
