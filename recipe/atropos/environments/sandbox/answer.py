"""An answer and its tests in separate processes, and the protocol by which the tests call the answer.

The answer's process runs the policy's program. The tests' process runs the problem's own code, calls the functions of
the answer over a socket, and decides the verdict. Guarantees:

- the tests' process alone decides: nothing that the answer prints, returns or patches, nor its exit status, is taken
  for the verdict;
- a returned value is data of built-in types, or a handle to an object that stays in the answer's process; a handle
  equals nothing but itself;
- the answer receives the arguments of one call at a time, and never the tests.

A message is a line of JSON. From the tests: ``[what, target, ...]``; a target is the name of a global or the number of
a handle. From the answer: ``["value", value]`` or ``["raise", type, text]``. Uses only the standard library.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

LONGEST = 4 << 20  # maximum bytes of a message
_DIGITS = 100_000  # maximum digits of an integer in a message
_DETAIL = 300  # maximum characters of a verdict's detail
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, bytearray)}
_ATTRIBUTES = {"complex": (complex, ("real", "imag")), "range": (range, ("start", "stop", "step"))}
_NEVER_RAISED = (StopIteration, StopAsyncIteration, AssertionError, Warning)  # they would alter how a test ends


class Handle:
    """Proxy of an object in the answer's process: forwards attributes, calls and iteration."""

    def __init__(self, ask: Callable[..., Any], target: str | int):
        vars(self).update(_ask=ask, _target=target)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self._target, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self._target, list(args), kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("items", self._target))


def encode(value: Any, keep: Callable[[Any], str | int]) -> Any:
    """Encode for JSON; a subclass of a built-in type becomes that type, any other object a handle from ``keep``."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *(encode(item, keep) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, keep), encode(item, keep)] for key, item in value.items())]
    for name, (kind, attributes) in _ATTRIBUTES.items():
        if isinstance(value, kind):
            return [name, *(getattr(value, attribute) for attribute in attributes)]
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return ["type", value.__name__]
    return ["handle", keep(value)]


def decode(value: Any, handle: Callable[[str | int], Any]) -> Any:
    """Return the value that ``encode`` was given.

    Raises:
        ValueError, TypeError, KeyError: ``encode`` does not produce such a value.
    """
    if not isinstance(value, list):
        return value
    match value:
        case ["handle", str() | int() as number]:
            return handle(number)
        case ["dict", *pairs]:
            return {decode(key, handle): decode(item, handle) for key, item in pairs}
        case ["type", str() as name] if isinstance(getattr(builtins, name, None), type):
            return getattr(builtins, name)
        case ["complex" | "range" as name, *values]:
            return _ATTRIBUTES[name][0](*values)
        case [str() as name, *items]:
            return _SEQUENCES[name](decode(item, handle) for item in items)
    raise ValueError("not a value")


def _send(descriptor: int, message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    if len(data) > LONGEST:
        raise ValueError(f"more than {LONGEST} bytes")
    while data:
        data = data[os.write(descriptor, data) :]


def _receive(descriptor: int) -> Any:
    """Return the next message.

    Raises:
        EOFError: the other process ended.
        ValueError, RecursionError: the data is not a message.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        if not (chunk := os.read(descriptor, 1 << 16)):
            raise EOFError
        data += chunk
        if len(data) > LONGEST:
            raise ValueError(f"more than {LONGEST} bytes")
    return json.loads(data)


# ---------------------------------------------------------------------- the answer's process


def run_answer(tests: int) -> NoReturn:
    """Execute the program, which is the first message, then serve calls until the tests close the connection."""
    sys.set_int_max_str_digits(_DIGITS)
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def reply(work: Callable[[], Any]) -> None:
        try:
            message = ["value", encode(work(), keep)]
        except BaseException as error:  # SystemExit and MemoryError too
            message = ["raise", type(error).__name__, str(error)[:_DETAIL]]
        _send(tests, message)

    space: dict[str, Any] = {"__name__": "answer"}
    program = _receive(tests)
    reply(lambda: exec(compile(program, "<answer>", "exec"), space) or sorted(map(str, space)))
    while True:
        try:
            what, target, *arguments = _receive(tests)
        except EOFError:
            os._exit(0)

        def there(target: str | int) -> Any:
            return space[target] if isinstance(target, str) else kept[target]

        def work(what: str = what, target: str | int = target, arguments: list = arguments) -> Any:
            values = [decode(value, there) for value in arguments]
            match what:
                case "get":
                    return getattr(there(target), values[0])
                case "set":
                    return setattr(there(target), *values)
                case "call":
                    return there(target)(*values[0], **values[1])
            return list(there(target))

        reply(work)


# ---------------------------------------------------------------------- the tests' process


def run_tests(job: dict[str, Any], answer: int, verdict: int) -> NoReturn:
    """Write ``{"passed", "why", "detail"}`` of a job to ``verdict``: ``program`` is the answer; ``setup`` and ``tests``
    are the problem's own code, in which ``names`` refer to the answer. ``answer`` is the connection to its process.

    ``why``: passed; wrong, raised (an exception, in the tests or the answer); undefined, invalid (the program cannot be
    executed); ended, unreadable (what the answer's process did); tests (their setup fails).
    """
    sys.set_int_max_str_digits(_DIGITS)

    def decide(why: str, detail: str = "") -> NoReturn:
        """End this process, so that the tests cannot go on."""
        found = {"passed": why == "passed", "why": why, "detail": detail[:_DETAIL]}
        os.write(verdict, json.dumps(found).encode())
        os._exit(0)

    def exchange(message: Any) -> Any:
        try:
            _send(answer, message)
            return _receive(answer)
        except (EOFError, ConnectionError):
            decide("ended")
        except (ValueError, RecursionError):
            decide("unreadable")

    def ask(what: str, target: str | int, *values: Any) -> Any:
        match exchange([what, target, *(encode(value, _target) for value in values)]):
            case ["value", value]:
                try:
                    return decode(value, lambda number: Handle(ask, number))
                except (ValueError, TypeError, KeyError, RecursionError):
                    decide("unreadable")
            case ["raise", str() as kind, str() as text]:
                raise _as_exception(kind, text)
        decide("unreadable")

    match exchange(job["program"]):
        case ["value", ["list", *defined]]:
            if missing := [name for name in job["names"] if name not in defined]:
                decide("undefined", ", ".join(missing))
        case ["raise", str() as kind, str() as text]:
            decide("invalid", f"{kind}: {text}")
        case _:
            decide("unreadable")
    decide(*_outcome(job, {name: Handle(ask, name) for name in job["names"]}))


def _outcome(job: dict[str, Any], own: dict[str, Handle]) -> tuple[str, str]:
    """Return ``why`` and the detail of tests whose names ``own`` refer to the answer."""
    space = {"__name__": "tests", **own}
    why = "tests"
    try:
        exec(compile(job["setup"], "<setup>", "exec"), space)
        space.update(own)
        tests, why = compile(job["tests"], "<tests>", "exec"), "raised"
        exec(tests, space)
    except AssertionError as error:
        return "wrong" if why == "raised" else why, str(error)
    except BaseException as error:
        return why, f"{type(error).__name__}: {error}"
    return "passed", ""


def _target(value: Any) -> str | int:
    if isinstance(value, Handle):
        return value._target
    raise TypeError(f"an answer cannot be given a {type(value).__name__}")


def _as_exception(kind: str, text: str) -> Exception:
    found = getattr(builtins, kind, None)
    known = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _NEVER_RAISED)
    try:
        return found(text) if known else RuntimeError(f"{kind}: {text}")
    except TypeError:
        return RuntimeError(f"{kind}: {text}")
