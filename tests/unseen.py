"""Notes what a program does while it is captured, where the capture does not see it: a list would be filled by each step."""

import sys

_EVENT = "lowtide.tests.unseen"
_noted = []
sys.addaudithook(lambda event, args: _noted.append(args) if event == _EVENT else None)  # Python calls it, no program leads to it


def note(key, item=None):
    sys.audit(_EVENT, key, item)


def taken(key):
    """What was noted under a key since somebody took it."""
    found = [item for each, item in _noted if each == key]
    _noted[:] = [each for each in _noted if each[0] != key]
    return found
