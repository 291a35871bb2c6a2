"""The two processes of the soak that own engines: one runs programs in threads, one serves HTTP.

python -m benchmarks.torture.soak_worker programs FOLDER SEED
python -m benchmarks.torture.soak_worker server FOLDER SEED

Each runs until its input ends, then checks what is left and prints a report as one line of JSON.
"""

import faulthandler
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.errors import ConfigError

from .campaign import leftovers
from .process_memory import MemorySampler, held, left_behind, mapped_memory
from .soak_programs import KINDS, SIBLING, TENANTS, Output, Program, compare_outputs, draw_kind
from .tiny_family import LAYER_PATTERN, NUM_ADAPTERS, Family, family_in

NUM_THREADS = 6
MAX_CLIENTS = 64  # at once
SWAPPED = "swapped"  # an adapter of the server that is replaced all the time
SWAPPED_FOLDERS = (2, 3)  # adapters that it is in turns
COMPARED = 0.25  # share of programs that also run on the quiet engine
CHECK_SECONDS = 0.5
KEYS = tuple(f"key-of-tenant-{name}" for name in TENANTS)
MAX_LOST = 50  # lines to keep


def open_engine(family: Family, cache: CacheConfig, *, num_adapters: int = 0, **options: Any) -> Engine:
    """Load an engine over the base, the sibling and some adapters."""
    names = {f"adapter-{i}": folder for i, folder in enumerate(family.adapters[:num_adapters])}
    return Engine.from_pretrained(
        family.base,
        config=EngineConfig(cache=cache, **options),
        dtype="float32",
        device="cpu",
        adapters=names,
        models={SIBLING: family.sibling},
        layer_reuse={SIBLING: LAYER_PATTERN},
    )


def crowded_cache(disk_dir: str, capacity: int) -> CacheConfig:
    """Return a cache whose tiers are all too small for the work."""
    return CacheConfig(
        capacity=capacity,
        page_size=8,
        host_capacity=capacity // 2,
        disk_capacity=capacity,
        disk_dir=disk_dir,
        eviction="workflow",
        poison_freed_pages=True,
    )


QUIET_CACHE = CacheConfig(capacity=16384, page_size=8, poison_freed_pages=True)


class Report:
    """What a process counts and reports at its end."""

    def __init__(self, seed: int) -> None:
        self.seed, self.counts, self.lost = seed, Counter[str](), list[str]()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def lose(self, what: str) -> None:
        with self._lock:
            self.counts["lost"] += 1
            if len(self.lost) < MAX_LOST:
                self.lost.append(what)
        print(what, file=sys.stderr, flush=True)

    @contextmanager
    def losing(self, what: str) -> Iterator[None]:
        """Note an exception of the block."""
        try:
            yield
        except BaseException as exc:
            self.lose(f"{what}: {type(exc).__name__}: {exc}\n{traceback.format_exc()[-1500:]}")


def check_regularly(report: Report, check: Callable[[], None], end: threading.Event) -> threading.Thread:
    """Call a check again and again in a thread."""

    def run() -> None:
        while not end.wait(CHECK_SECONDS):
            with report.losing("check"):
                check()
            report.count("checks")

    thread = threading.Thread(target=run, name="checks", daemon=True)
    thread.start()
    return thread


def finish_engine(report: Report, engine: Engine, disk_dir: str, name: str) -> None:
    """Check that nothing of an idle engine is left, and close it."""
    with report.losing(f"end of {name}"):
        left, events = leftovers(engine), engine.stats().events
        if files := len(list(Path(disk_dir).rglob("*.safetensors"))):
            left["files"] = files
        if left:
            report.lose(f"end of {name}: left {left}")
        report.counts.update({f"{name} {kind}": count for kind, count in events.items()})
        engine.close()
        if folders := os.listdir(disk_dir):
            report.lose(f"end of {name}: folders {folders} are left")


def compare(report: Report, kind: str, index: int, outputs: list[Output], quiet: list[Output]) -> None:
    """Note tokens that differ by more than rounding."""
    report.count("compared", len(quiet))
    differences, is_rounded = compare_outputs(outputs, quiet)
    report.count("rounding", int(is_rounded))
    for difference in differences:
        report.lose(f"seed {report.seed}, program {index} ({kind}), {difference}")


def run_programs(family: Family, seed: int) -> None:
    """Run programs in threads until the input ends."""
    report, before = Report(seed), held()
    with tempfile.TemporaryDirectory() as disk_dir:
        engine = open_engine(family, crowded_cache(disk_dir, 2048))
        quiet = open_engine(family, QUIET_CACHE, backend="reference")
        quiet_lock, end, indexes = threading.Lock(), threading.Event(), itertools.count()

        def run_one(index: int, place: str) -> None:
            rng = random.Random(f"{seed} {index}")
            kind, is_compared = draw_kind(rng), rng.random() < COMPARED
            state = rng.getstate()
            program = Program(engine, family, rng, place, is_quiet=False)
            KINDS[kind][0](program)
            report.count("programs")
            report.count(f"programs of kind {kind}")
            report.count("requests", program.num_requests)
            if is_compared:
                with quiet_lock:
                    rng = random.Random()
                    rng.setstate(state)
                    other = Program(quiet, family, rng, place, is_quiet=True)
                    KINDS[kind][0](other)
                    quiet.run_until_idle()
                    quiet.clear_cache()
                compare(report, kind, index, program.outputs, other.outputs)

        def work(place: str) -> None:
            while not end.is_set():
                index = next(indexes)
                with report.losing(f"seed {seed}, program {index}"):
                    run_one(index, place)

        threads = [threading.Thread(target=work, args=(str(i),), name=f"worker-{i}") for i in range(NUM_THREADS)]
        checks = check_regularly(report, engine.check, end)
        sampler, objects, maps = MemorySampler(), [], []
        for thread in threads:
            thread.start()
        print(json.dumps({"ready": True}), flush=True)
        watch_until_end_of_input(objects, maps)
        end.set()
        for thread in (*threads, checks):
            thread.join(120)
            if thread.is_alive():
                report.lose(f"thread {thread.name} does not end")
                faulthandler.dump_traceback(file=sys.stderr)
        samples = sampler.stop()
        finish_engine(report, engine, disk_dir, "engine")
        quiet.close()
    finish_process(report, before, samples, objects, maps)


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[tuple[str, Any]]:
    """Serve an engine in a thread; yield the address and the service."""
    import uvicorn

    from choreograph.server.app import create_app
    from choreograph.server.server_config import KEEP_ALIVE_SECONDS, ServerConfig

    app = create_app(engine, ServerConfig(api_keys=KEYS, served_model_name="base", **options))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_keep_alive=KEEP_ALIVE_SECONDS))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.state.service
    finally:
        server.should_exit = True
        thread.join(60)
    if thread.is_alive():
        raise RuntimeError("the server did not end")


def run_server(family: Family, seed: int) -> None:
    """Serve a crowded and a quiet engine until the input ends."""
    from choreograph.cli.serve_command import limit_primitive_cache
    from choreograph.server.engine_thread import load_engine
    from choreograph.server.structured.constraints import CHECKER

    limit_primitive_cache()
    with suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()  # libuv keeps a pipe for the whole process
    report, before = Report(seed), held()
    with tempfile.TemporaryDirectory() as disk_dir:
        cache = crowded_cache(disk_dir, 4096)
        engine = load_engine(lambda: open_engine(family, cache, num_adapters=2, draft_tokens=2))
        quiet = load_engine(lambda: open_engine(family, QUIET_CACHE, num_adapters=NUM_ADAPTERS, backend="reference"))
        # Stores of both servers are full within minutes: what grows afterwards is a leak.
        limits: Any = {"max_workflow_tokens": 4000, "max_workflows": 8, "max_stored_responses": 8}
        with (
            serving(quiet, **limits) as (quiet_url, _),
            serving(engine, shadow_calls=0.05, max_requests=3 * MAX_CLIENTS, **limits) as (url, service),
        ):
            store, end = service.planner.store, threading.Event()
            versions = itertools.cycle(family.adapters[number] for number in SWAPPED_FOLDERS)

            def swap_adapter() -> None:
                """Replace an adapter under its name, unless a message of it is left."""
                if SWAPPED in engine.models:
                    try:
                        engine.remove_adapter(SWAPPED)
                    except ConfigError:
                        report.count("adapter in use")
                        return
                engine.add_adapter(SWAPPED, next(versions))
                report.count("adapters replaced")

            def check() -> None:
                """Check all owners in the engine's thread, between two steps."""
                done = threading.Event()

                def run() -> None:
                    with report.losing("check"):
                        engine.check()
                        store.check()
                        swap_adapter()
                    done.set()

                service.thread.defer(run)
                if not done.wait(60):
                    raise RuntimeError("the engine's thread ran nothing for a minute")

            checks = check_regularly(report, check, end)
            sampler, objects, maps = MemorySampler(), [], []
            print(json.dumps({"ready": True, "url": url, "quiet": quiet_url}), flush=True)
            watch_until_end_of_input(objects, maps)
            end.set()
            checks.join(120)
            samples = sampler.stop()
            is_idle = wait_for(lambda: not (engine.core.scheduler.num_unfinished or service.thread.num_generations))
            if not is_idle:
                report.lose(f"requests are left: {engine.stats()}")
        finish_engine(report, engine, disk_dir, "engine")
        quiet.close()
    CHECKER.close()  # its process lasts as long as this one
    finish_process(report, before, samples, objects, maps)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait for a condition; return whether it came true."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return is_true


def watch_until_end_of_input(objects: list[Any], maps: list[Any], period: float = 30.0) -> None:
    """Wait for the end of the input; count objects and mappings now and then."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), name="input", daemon=True).start()
    start = time.monotonic()
    while True:
        is_ended = ended.wait(period)
        objects.append((time.monotonic() - start, len(gc.get_objects())))
        maps.append((time.monotonic() - start, mapped_memory()))
        if is_ended:
            return


def finish_process(
    report: Report, before: Any, samples: list[dict[str, float]], objects: list[Any], maps: list[Any]
) -> None:
    """Check that no thread and no file is left; print the report."""
    gc.collect()
    end, left = time.monotonic() + 20, [""]
    while left and time.monotonic() < end:  # idle threads of transfers end after seconds
        left = left_behind(before, held())
        time.sleep(0.2 if left else 0)
    if left:
        report.lose(f"left: {left}")
    result = {"counts": report.counts, "lost": report.lost, "samples": samples, "objects": objects, "maps": maps}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    role, folder, number = sys.argv[1:]
    {"programs": run_programs, "server": run_server}[role](family_in(Path(folder)), int(number))
