"""Records when functions are called, in every process that has this folder on PYTHONPATH.

RECORDED_FUNCTIONS is a list ``module:name ...``, of functions, methods and classes; RECORDED_CALLS a file, which gets a
line for each call: ``begun`` or ``ended``, nanoseconds of the machine's clock, and the name.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import time

NAMED = {}
for named in os.environ.get("RECORDED_FUNCTIONS", "").split():
    NAMED.setdefault(named.partition(":")[0], []).append(named)


def say(event, named):
    with open(os.environ["RECORDED_CALLS"], "a") as file:
        file.write(f"{event} {time.monotonic_ns()} {named}\n")


def recorded(function, named):
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call(*args, **kwargs):
            say("begun", named)
            try:
                return await function(*args, **kwargs)
            finally:
                say("ended", named)

    else:

        @functools.wraps(function)
        def call(*args, **kwargs):
            say("begun", named)
            try:
                return function(*args, **kwargs)
            finally:
                say("ended", named)

    return call


def record(module, named):
    owner, *inner = (named.partition(":")[2]).split(".")
    place, name = (vars(module)[owner], inner[0]) if inner else (module, owner)
    found = vars(place)[name]
    if inspect.isclass(found):
        place, name, found = found, "__init__", found.__init__
    if isinstance(found, classmethod | staticmethod):
        setattr(place, name, type(found)(recorded(found.__func__, named)))
    else:
        setattr(place, name, recorded(found, named))
        registered = getattr(sys.modules.get("recipe.atropos.trajectory_api.endpoints"), "ENDPOINTS", {})
        for key, endpoint in registered.items():
            if endpoint.function is found:
                registered[key] = dataclasses.replace(endpoint, function=getattr(place, name))


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in NAMED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for named in NAMED[name]:
                record(module, named)

        spec.loader.exec_module = exec_module
        return spec


if NAMED:
    sys.meta_path.insert(0, Finder())
