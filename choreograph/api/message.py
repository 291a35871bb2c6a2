"""`Message`: handle of one `prefill` or `decode`, with what features know of it."""

from typing import Self

from ..errors import InvalidRequestError
from ..features.explain import Explanation, explain
from ..features.guard import labels_of
from ..messages.handle import MessageHandle


class Message(MessageHandle):
    """Handle of one message of a session, complete or not."""

    @property
    def computed_layers(self) -> tuple[int, ...] | None:
        """Layers this model computed; None for all of them.

        The other layers are reused from another model.
        """
        return None if self._request.layers is None else tuple(sorted(self._request.layers))

    @property
    def labels(self) -> frozenset[str]:
        """Labels of the message's text and of everything it attended to."""
        return labels_of(self._request).effective

    def declassify(self, *labels: str) -> Self:
        """Remove labels from the message, for its later readers.

        Messages that attended to it before keep theirs. Returns the message.
        """
        own = labels_of(self._request)
        if unknown := set(labels) - own.effective:
            raise InvalidRequestError(
                f"message {self.id} has no labels {sorted(unknown)}: use some of {sorted(own.effective)}"
            )
        own.text, own.effective = own.text.difference(labels), own.effective.difference(labels)
        self._core.events.emit("declassified", request=self.id, labels=sorted(labels))
        return self

    def explain(self, *, measure: bool = False) -> Explanation:
        """Compare the message's context with prefix mode; completes the message.

        Args:
            measure: also compute the divergence of the message's distributions from prefix mode, in
                one pass over the text of context and message, and with some shares of repair.
        """
        return explain(self, measure=measure)
