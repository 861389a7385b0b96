"""memopt._C.Disk with faults: the N-th read or write fails, and jobs are done as early or as late as they may."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from memopt import _C

Disk = _C.Disk


class Plan:
    """after: of each kind of job so many go well, -1 all. writes that follow one that failed fail, as the engine's do.
    at: "its time", "once" or "last", when somebody waits for it. begun, behind: jobs, and those behind a copy."""

    def __init__(self, at: str = "its time", **after: int) -> None:
        self.at, self.after = at, {"read": -1, "write": -1} | after
        self.begun = {"read": 0, "write": 0}
        self.failed = {"read": 0, "write": 0}

    def fails(self, kind: str) -> bool:
        number, self.begun[kind] = self.begun[kind], self.begun[kind] + 1
        after = self.after[kind]
        fails = number == after or (kind == "write" and 0 <= after < number)
        self.failed[kind] += fails
        return fails

    def disk(self, directory: str) -> FailingDisk:
        return FailingDisk(directory, self)


class FailingDisk:
    def __init__(self, directory: str, plan: Plan) -> None:
        self._disk, self._plan = Disk(directory), plan
        self._late: deque[Job] = deque()

    def reserve(self, at: int, nbytes: int) -> None:
        self._disk.reserve(at, nbytes)

    def write(self, tensor: Any, at: int, device: int = 0, behind: int = 0) -> Job:
        if self._plan.fails("write"):
            if self._plan.failed["write"] > 1:  # as the engine, where one has failed
                raise OSError(errno.EIO, "planted: a write failed before")
            tensor = tensor.clone().zero_()  # and nobody knows what is there now
            return self._job(FailingJob(self, lambda: self._disk.write(tensor, at)))
        return self._job(WriteJob(self, lambda: self._disk.write(tensor, at, device, behind)))

    def read(self, tensor: Any, written: Job, device: int = 0, behind: int = 0) -> Job:
        kind = FailingJob if self._plan.fails("read") else ReadJob
        return self._job(kind(self, lambda: self._disk.read(tensor, written.done(), device, behind)))

    def _job(self, job: Job) -> Job:
        if self._plan.at == "last":
            self._late.append(job)
        else:
            job.done()
            if self._plan.at == "once":
                job.done().finish()
        return job

    def until(self, job: Job) -> None:
        while job in self._late:
            self._late.popleft().done()


class Job:
    def __init__(self, disk: FailingDisk, begin: Callable[[], Any]) -> None:
        self._disk, self._begin, self._job = disk, begin, None

    def done(self) -> Any:
        self._disk.until(self)
        if self._job is None:
            self._job = self._begin()
        return self._job

    def finish(self) -> None:
        self.done().finish()


class ReadJob(Job):
    def finish(self) -> None:
        super().finish()


class WriteJob(Job):
    def finish(self) -> None:
        super().finish()


class FailingJob(Job):
    def finish(self) -> None:
        super().finish()
        raise OSError(errno.EIO, "planted: the disk is faulty")
