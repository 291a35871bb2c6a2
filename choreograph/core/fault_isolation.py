"""Search for the request with which scheduling raises."""

from ..request.request import Request, RequestState
from .scheduler import Scheduler
from .waiting_queue import Queues, WaitingQueue


def find_unschedulable(scheduler: Scheduler) -> tuple[Request, Exception] | None:
    """Return a request with which scheduling raises, and the exception.

    Return None if there is none. Schedules again with one more request each time, without computing anything.
    """
    queues = scheduler.queues
    pending = [*queues.running, *queues.waiting]
    queues.running, queues.waiting, queues.is_probing = [], WaitingQueue(), True
    try:
        while pending:
            request = pending.pop(0)
            if request.is_finished:  # with its parent
                continue
            queued = {*queues.running, *queues.waiting}
            _enqueue(queues, request)
            try:
                scheduler.schedule()
                scheduler.rollback()
                scheduler.pack(list(queues.running))  # those that `schedule` deferred too
            except Exception as exc:
                added = [other for other in (*queues.running, *queues.waiting) if other not in {*queued, request}]
                if not added:
                    return (request, exc)
                scheduler.rollback()  # try what the request's admission has added, then the request again
                queues.running = [other for other in queues.running if other in queued]
                queues.waiting = WaitingQueue(other for other in queues.waiting if other in queued)
                pending = [*added, request, *pending]
            scheduler.rollback()
        return None
    finally:
        scheduler.rollback()
        queued = {*queues.running, *queues.waiting}
        for request in pending:
            if not request.is_finished and request not in queued:
                _enqueue(queues, request)
        queues.is_probing = False


def _enqueue(queues: Queues, request: Request) -> None:
    if request.state is RequestState.WAITING:
        queues.waiting.add(request)
    else:
        queues.running.append(request)
