"""Encodings across models of one family (DroidSpeak): stored by content, profiled, chosen under load."""

from .choice import Choice, share_by
from .profile import Cell, Point, Profile
from .storage import ContextStore, content_name

__all__ = ["Cell", "Choice", "ContextStore", "Point", "Profile", "content_name", "share_by"]
