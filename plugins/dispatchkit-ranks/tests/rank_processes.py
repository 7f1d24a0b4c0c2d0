"""Start ranks as processes, forked from one interpreter that has imported torch.

Run as a script, this file is that interpreter: it reads requests as JSON lines and prints the
results of each rank. A second forked process serves the store, as torchrun's agent does, so that
any rank may die. A watchdog kills ranks that exceed the limit of their request.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HUNG, DIED = "hung", "died"


class Worlds:
    """Client of the forking interpreter, for tests."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The store warns of every wait that times out; tests cause such waits on purpose.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                # A TCPStore resolves the names of its clients; limit the wait for a name server
                # that does not answer.
                "RES_OPTIONS": "timeout:1 attempts:1",
            },
        )
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def run(self, requests, *, limit=60.0, at_once=1):
        """Run groups of ranks; return a list of results per request, in order.

        Args:
            requests: Dictionaries with ``case`` (name of a function of rank_cases), ``size``, and
                further arguments of that function.
            limit: Seconds until a rank counts as hung and is killed.
            at_once: Number of groups that run at the same time.

        The result of a rank is the return value of the case, ``{"error": text}``, ``"died"`` or
        ``"hung"``.
        """
        message = {"requests": list(requests), "limit": limit, "at_once": at_once}
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run_one(self, case, size=2, *, limit=60.0, **arguments):
        """Run one group; return the results of its ranks."""
        return self.run([{"case": case, "size": size, **arguments}], limit=limit)[0]


# -- forking interpreter --------------------------------------------------------------------


def _rank(request, world, rank, port, pipe):
    """Run one rank, write its result to the pipe and exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import rank_cases

    try:
        result = rank_cases.run(request, world, rank, port)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        result = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(pipe, "w") as stream:
        json.dump(result, stream)


def _fork(run):
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    finally:
        os._exit(code)


class _World:
    """A running group of ranks."""

    def __init__(self, index, number, request, port, limit):
        self.index = index
        self.deadline = time.monotonic() + limit
        self.pids, self.pipes = {}, {}
        for rank in range(request["size"]):
            reading, writing = os.pipe()
            self.pids[rank] = _fork(lambda r=rank, w=writing: _rank(request, number, r, port, w))
            os.close(writing)
            self.pipes[rank] = reading
        self.results = {}

    def is_over(self):
        """Collect ranks that have ended; kill ranks that are stopped or exceed the limit."""
        for rank, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._collect(rank, DIED)
        # A stopped rank never ends by itself; kill it when all others have ended.
        if self.pids and (self._rest_is_stopped() or time.monotonic() > self.deadline):
            for rank, pid in list(self.pids.items()):
                found = DIED if _is_stopped(pid) else HUNG
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._collect(rank, found)
        return not self.pids

    def _rest_is_stopped(self):
        return all(map(_is_stopped, self.pids.values()))

    def _collect(self, rank, otherwise):
        with os.fdopen(self.pipes.pop(rank)) as stream:
            text = stream.read()
        self.results[rank] = json.loads(text) if text else otherwise
        del self.pids[rank]

    def in_order(self):
        return [self.results[rank] for rank in sorted(self.results)]


def _is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _serve_store(pipe):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    signal.pause()


def main():
    """Answer requests until the input ends."""
    sys.path.insert(0, str(Path(__file__).parent))
    import rank_cases  # noqa: F401 - every rank needs it, and torch with it

    # Exclude imported objects from each rank's garbage collections, which would copy their pages.
    gc.collect()
    gc.freeze()
    reading, writing = os.pipe()
    agent = _fork(lambda: _serve_store(writing))
    with os.fdopen(reading) as stream:
        port = int(stream.readline())
    number = 0
    try:
        for line in sys.stdin:
            message = json.loads(line)
            waiting = list(enumerate(message["requests"]))
            results = [None] * len(waiting)
            running = []
            while waiting or running:
                while waiting and len(running) < message["at_once"]:
                    index, request = waiting.pop(0)
                    number += 1
                    running.append(_World(index, number, request, port, message["limit"]))
                for world in list(running):
                    if world.is_over():
                        results[world.index] = world.in_order()
                        running.remove(world)
                time.sleep(0.002)  # polling interval for ended processes
            print(json.dumps(results), flush=True)
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


if __name__ == "__main__":
    main()
