"""Finds the end of a JSON object: the pure-Python twin of `_objects.pyx`.

The scanner reads each byte once, in any chunking, without recursion: its memory is a state and one
byte per open level. It checks the grammar of objects, arrays and strings; the decoder, which gets
the whole object, checks numbers, literals such as `true` and escapes. The verdicts of `scan`:

    MORE     the object continues after these bytes
    END      it ended; the position is after it
    BAD      it is malformed; the position is the first invalid byte
    RESTART  the same, and that byte is a `{` at the beginning of a line: the next object
    DEEP     it is over `depth_max` levels deep. The rest is skipped, and the next END is where the
             levels close or the line ends, whichever is first, so that an object that never closes
             does not consume the following lines.
"""

import re

from polybus.scan.batch import Buffer

MORE, END, BAD, RESTART, DEEP = range(5)

_OPEN = {ord("{"): "key or end", ord("["): "value or end"}
_CLOSE = {ord("}"): ("{", "key or end"), ord("]"): ("[", "value or end")}
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*+')
_TOKEN = re.compile(rb"[0-9A-Za-z+.-]*+")
_DULL = re.compile(rb'[^"\n{}\[\]]*+')
_SPACE = frozenset(b" \t\r\n")
_TOKEN_BYTES = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+.-")
_RUNS = {"string": _PLAIN, "token": _TOKEN, "skip": _DULL}


class ObjectScanner:
    """Finds the end of one JSON object in a stream that arrives in pieces."""

    def __init__(self, depth_max: int) -> None:
        if depth_max < 1:
            raise ValueError("depth_max must be 1 or more")
        self._depth_max = depth_max
        self.reset()

    def reset(self) -> None:
        """Begin a new object."""
        self._opened: list[str] = []
        self._skipped_depth = 0
        self._state = "begin"
        self._in_key = False
        self._after_newline = False

    def scan(self, buffer: Buffer, start: int, stop: int) -> tuple[int, int]:
        """Continue with `buffer[start:stop]`; return (where it stopped, verdict)."""
        view = memoryview(buffer)
        at = start
        verdict = MORE
        while at < stop:
            run = _RUNS.get(self._state)
            if run is not None:
                found = run.match(view, at, stop)
                at = found.end() if found is not None else at
                if at == stop:
                    break
                if self._state == "token":
                    self._state = "after"
            verdict = self._step(view[at])
            if verdict == BAD:
                newline = view[at - 1] == 10 if at > start else self._after_newline
                if view[at] == ord("{") and self._state != "begin" and newline:
                    verdict = RESTART
                break
            at += 1
            if verdict != MORE:
                break
        if at > start:
            self._after_newline = view[at - 1] == 10
        return at, verdict

    def _step(self, byte: int) -> int:
        state = self._state
        if state.startswith("skip"):
            return self._skip(byte)
        if state in ("string", "escape"):
            return self._step_string(byte)
        if byte in _SPACE and state != "begin":
            return MORE
        if byte in _OPEN:
            begins = state in ("value", "value or end") or (state == "begin" and byte == ord("{"))
            return self._open(byte) if begins else BAD
        if state == "begin":
            return BAD
        if byte in _CLOSE:
            return self._close(byte)
        if byte == ord(","):
            self._state = "key" if self._opened[-1] == "{" else "value"
            return MORE if state == "after" else BAD
        if byte == ord(":"):
            self._state = "value"
            return MORE if state == "colon" else BAD
        return self._begin_scalar(byte)

    def _step_string(self, byte: int) -> int:
        if byte < 0x20:
            return BAD
        if self._state == "escape":
            self._state = "string"
        elif byte == ord('"'):
            self._state = "colon" if self._in_key else "after"
        else:
            self._state = "escape" if byte == ord("\\") else "string"
        return MORE

    def _begin_scalar(self, byte: int) -> int:
        key = self._state in ("key", "key or end")
        if not key and self._state not in ("value", "value or end"):
            return BAD
        if byte == ord('"'):
            self._in_key = key
            self._state = "string"
            return MORE
        self._state = "token"
        return BAD if key or byte not in _TOKEN_BYTES else MORE

    def _open(self, byte: int) -> int:
        if len(self._opened) == self._depth_max:
            self._skipped_depth = self._depth_max + 1
            self._state = "skip"
            return DEEP
        self._opened.append(chr(byte))
        self._state = _OPEN[byte]
        return MORE

    def _close(self, byte: int) -> int:
        opened, empty = _CLOSE[byte]
        if self._state not in ("after", empty) or self._opened[-1] != opened:
            return BAD
        self._opened.pop()
        self._state = "after"
        return MORE if self._opened else END

    def _skip(self, byte: int) -> int:
        if byte == 10:
            return END
        if self._state == "skip escape":
            self._state = "skip string"
        elif self._state == "skip string":
            self._state = {ord('"'): "skip", ord("\\"): "skip escape"}.get(byte, "skip string")
        elif byte == ord('"'):
            self._state = "skip string"
        elif byte in _OPEN:
            self._skipped_depth += 1
        elif byte in _CLOSE:
            self._skipped_depth -= 1
            return MORE if self._skipped_depth else END
        return MORE
