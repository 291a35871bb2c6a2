"""Search for the request with which scheduling raises."""

from typing import TYPE_CHECKING

from ..request.request import Request, RequestState
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from .scheduler import Scheduler


def find_unschedulable(scheduler: "Scheduler") -> tuple[Request, Exception] | None:
    """Return a request with which scheduling raises, and the exception.

    Return None if there is none. Schedules again with one more request each time, without computing anything.
    """
    pending = [*scheduler.running, *scheduler.waiting]
    scheduler.running, scheduler.waiting, scheduler.is_probing = [], WaitingQueue(), True
    try:
        while pending:
            request = pending.pop(0)
            if request.is_finished:  # with its parent
                continue
            queued = {*scheduler.running, *scheduler.waiting}
            _enqueue(scheduler, request)
            try:
                scheduler.schedule()
                scheduler.rollback()
                scheduler.pack(list(scheduler.running))  # those that `schedule` deferred too
            except Exception as exc:
                added = [other for other in (*scheduler.running, *scheduler.waiting) if other not in {*queued, request}]
                if not added:
                    return (request, exc)
                scheduler.rollback()  # try what the request's admission has added, then the request again
                scheduler.running = [other for other in scheduler.running if other in queued]
                scheduler.waiting = WaitingQueue(other for other in scheduler.waiting if other in queued)
                pending = [*added, request, *pending]
            scheduler.rollback()
        return None
    finally:
        scheduler.rollback()
        queued = {*scheduler.running, *scheduler.waiting}
        for request in pending:
            if not request.is_finished and request not in queued:
                _enqueue(scheduler, request)
        scheduler.is_probing = False


def _enqueue(scheduler: "Scheduler", request: Request) -> None:
    if request.state is RequestState.WAITING:
        scheduler.waiting.add(request)
    else:
        scheduler.running.append(request)
