"""Many mutants in processes of their own: one that dies, hangs or grows is a finding, and the rest go on."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from .rounds import Mutant

ADDRESS_BYTES = 12 << 30
"""A process may reserve no more; torch takes a few gigabytes of it."""
LONGEST_S = 120.0
"""Without a word from a worker; a kernel's first compilation takes some seconds."""
BATCH = 50


@dataclass
class Tally:
    """What came of all mutants."""

    mutants: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0
    resident: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, mutant: Mutant) -> None:
        """Count one."""
        self.mutants += 1
        name = f"{mutant.what}: {mutant.outcome.kind}"
        self.kinds[name] = self.kinds.get(name, 0) + 1
        self.seconds = max(self.seconds, mutant.outcome.seconds)
        self.bytes = max(self.bytes, mutant.outcome.bytes)


def work(seed: int, numbers: range, results: Connection, at) -> None:
    """Run mutants in this process; ``at`` tells which one is under way."""
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    import torch

    from . import rounds

    torch.set_num_threads(1)
    rounds.warm_up()
    batch = []
    for number in numbers:
        at.value = number
        mutant = rounds.run(seed, number)
        batch.append(mutant if mutant.outcome.finding else mutant._replace(files={}))
        if len(batch) == BATCH or mutant.outcome.finding:
            results.send((batch, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10))
            batch = []
    results.send((batch, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10))


class Worker:
    """One process and its share of the numbers; a new process goes on behind a mutant that ended the last one."""

    def __init__(self, seed: int, numbers: range) -> None:
        """Start."""
        self.seed, self.numbers, self.seen = seed, numbers, 0
        self.spawn = multiprocessing.get_context("spawn")
        self.start(numbers)

    def start(self, numbers: range) -> None:
        """A process for the rest of the share."""
        self.rest, self.at = numbers, self.spawn.Value("q", numbers.start)
        self.results, given = self.spawn.Pipe(duplex=False)
        self.process = self.spawn.Process(target=work, args=(self.seed, numbers, given, self.at), daemon=True)
        self.process.start()
        given.close()
        self.heard = time.monotonic()

    def take(self, tally: Tally) -> list[Mutant]:
        """Findings that came since the last time; counts everything."""
        found = []
        try:
            while self.results.poll():
                batch, resident = self.results.recv()
                self.heard = time.monotonic()
                tally.resident = max(tally.resident, resident)
                for mutant in batch:
                    tally.add(mutant)
                    found += [mutant] if mutant.outcome.finding else []
        except EOFError:
            self.process.join()
        return found

    def is_over(self) -> bool:
        """Whether its process has ended; one that was silent for too long is ended."""
        if self.process.is_alive():
            if time.monotonic() - self.heard < LONGEST_S:
                return False
            self.process.kill()
        self.process.join()
        return True

    def goes_on(self, tally: Tally) -> bool:
        """Whether another process does the rest of the share, behind the mutant that ended this one."""
        code = self.process.exitcode
        if code == 0:
            return False
        if code > 0:
            raise RuntimeError("a process of the fuzzer failed, as told above")
        number = self.at.value
        how = signal.Signals(-code).name
        tally.findings.append(f"{number}: it ended its process ({how}); mutants just before it are not counted")
        after = range(number + self.rest.step, self.rest.stop, self.rest.step)
        if after:
            self.start(after)
        return bool(after)


def run_all(seed: int, numbers: range, jobs: int, keep) -> Tally:
    """Run mutants on several processes.

    Args:
        seed: Of them all.
        numbers: Which.
        jobs: Processes.
        keep: Called with each mutant that is a finding.

    Returns:
        What came of them.
    """
    tally = Tally()
    workers = [Worker(seed, numbers[job::jobs]) for job in range(min(jobs, len(numbers)))]
    while workers:
        time.sleep(0.05)
        running = []
        for worker in workers:
            is_over = worker.is_over()  # before its last words are taken
            for mutant in worker.take(tally):
                keep(mutant)
                tally.findings.append(f"{mutant.number}: {mutant.what}: {mutant.outcome.finding}")
            if not is_over or worker.goes_on(tally):
                running.append(worker)
        workers = running
    return tally
