"""Which posts without a key are repetitions of earlier ones.

Guarantees:

- A post counts as a repetition only of an equal one that was stored and whose connection broke before its answer was
  written, or after whose storing the server was killed. Each such post has one repetition; all others are new.
- ``KEPT_SECONDS`` after it was stored, nobody repeats a post any more: a stock environment makes 3 attempts, of at most
  300 s each (aiohttp's default), with pauses of at most 10 s (``BaseEnv._send_scored_data_to_api``), and an answer is
  held for at most 60 s after storing. So the last attempt begins at most 60 + 10 + 300 + 10 s after it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from isal import isal_zlib

KEPT_SECONDS = 390.0


def digest_of(body: bytes) -> str:
    """Return what tells a post's content from another's; it need not withstand an adversary."""
    return f"{len(body)}.{isal_zlib.crc32(body)}.{isal_zlib.adler32(body)}"


@dataclass(eq=False)
class Unanswered:
    """A post without a key, until its answer is written; ``gone()`` says whether its client has left.

    ``storing`` has the number of its row in the store, as ``database.append`` returns it. ``time`` is when it was
    stored, or found broken.
    """

    groups: int
    storing: "asyncio.Future[int | None]"
    gone: Callable[[], bool]
    answered: bool = False
    broken: bool = False
    time: float = field(default_factory=time.time)


class Repetitions:
    """The posts that may be repeated. ``forgotten`` has the rows of those that no longer can be, for the store to
    delete; ``on_forgotten`` is called when there is one.
    """

    def __init__(self, loaded: Iterable[tuple[int, str, int, float]], on_forgotten: Callable[[], object]):
        self._posts: dict[str, list[Unanswered]] = {}  # by digest
        self.forgotten: list[int] = []
        self._on_forgotten = on_forgotten
        for row, digest, groups, stored in loaded:
            storing = asyncio.get_running_loop().create_future()
            storing.set_result(row)
            post = Unanswered(groups, storing, lambda: True, broken=True, time=stored)
            self._posts.setdefault(digest, []).append(post)

    def take(self, digest: str | None, gone: Callable[[], bool]) -> Unanswered | None:
        """Return the repetition of an equal post whose connection broke; None if there is none."""
        for earlier in self._posts.get(digest, ()) if digest is not None else ():
            if earlier.gone() and not _is_late(earlier):
                self._remove(digest, earlier)
                return Unanswered(earlier.groups, earlier.storing, gone)
        return None

    @contextlib.contextmanager
    def noted(self, digest: str | None, own: Unanswered) -> Iterator[None]:
        """Let equal posts know of this one, until it is answered."""
        if digest is None or not own.groups:
            yield
            return
        self._posts.setdefault(digest, []).append(own)
        stored = False
        try:
            yield
            stored = True
        finally:
            if own in self._posts.get(digest, ()):  # no repetition has taken its place
                if stored and not own.answered:
                    own.broken, own.gone, own.time = True, lambda: True, time.time()
                else:
                    self._remove(digest, own)
                    if stored:
                        self._forget(own)

    def expire(self) -> None:
        """Forget the posts that nobody repeats any more."""
        for digest, posts in list(self._posts.items()):
            for post in filter(_is_late, list(posts)):
                self._remove(digest, post)
                self._forget(post)

    def _forget(self, post: Unanswered) -> None:
        if (row := post.storing.result()) is not None:
            self.forgotten.append(row)
            self._on_forgotten()

    def _remove(self, digest: str, post: Unanswered) -> None:
        self._posts[digest].remove(post)
        if not self._posts[digest]:
            del self._posts[digest]


def _is_late(post: Unanswered) -> bool:
    return post.broken and time.time() - post.time > KEPT_SECONDS
