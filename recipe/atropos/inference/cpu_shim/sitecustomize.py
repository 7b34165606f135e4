"""Lets SGLang start on a CPU from the released wheels. Python runs this file at the start of every process of SGLang.

SGLang spawns its scheduler and detokenizer as new processes, so each of them needs these workarounds: this folder, and
nothing else of the project, is first on that environment's PYTHONPATH. Guarantees:

* it does nothing unless ``SGLANG_USE_CPU_ENGINE=1``: a GPU server never sees a stub;
* it imports nothing (no torch) at start: a process that never imports these packages pays only for three finders;
* real packages take precedence: the stub is the last finder asked, the schemas are declared only if torchvision's own
  library cannot be loaded, and only those SGLang modules are changed that ask for pinned memory unconditionally;
* it always runs the ``sitecustomize`` that it shadows.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Missing:
    """A name in the stub: imports, has attributes, can be subclassed or compared; calling it says what is missing.

    Attributes, because SGLang reads some at import time (``scalar_types.uint4b8``).
    """

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(f"{self._name} is a stub without {attribute}")
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(
            f"{self._name} was called, but sgl_kernel has no build for this CPU: the model or an option needs it"
        )


class _KernelStub:
    """Finder and loader of `sgl_kernel` and all its submodules, which SGLang imports at the top of its modules.

    The released kernel wheels need CUDA, or a CPU with AVX-512. With the torch_native backend no kernel is called.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "sgl_kernel" or fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        module.__getattr__ = _Missing(module.__name__).__getattr__


class _TorchvisionSchemas:
    """Declares two operators just before torchvision is imported, then steps aside.

    The wheel on PyPI is linked to CUDA: on a machine without it, its library fails to load, silently, and its Python
    side then registers fake kernels for operators that nobody declared, which is an error. Schemas are enough for
    that: a text model never calls them.
    """

    _library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision" or self._library is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not spec.submodule_search_locations:
            return None
        import torch

        try:
            torch.ops.load_library(os.path.join(spec.submodule_search_locations[0], "_C.so"))
        except OSError:
            self._library = torch.library.Library("torchvision", "FRAGMENT")  # kept: freeing it undeclares them
            for operator in ("nms", "qnms"):
                self._library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # the ordinary finders import torchvision itself


_PINNED = {b"pin_memory=True": b"pin_memory=False", b".pin_memory()": b""}


class _PageableSource(importlib.machinery.SourceFileLoader):
    """Compiles a module without its literal requests for pinned memory; line numbers stay. No bytecode is cached."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        source = self.get_data(path)
        for asked, instead in _PINNED.items():
            source = source.replace(asked, instead)
        return self.source_to_code(source, path)


class _NoPinnedMemory:
    """Finder of SGLang's modules that pin host memory without checking that there is a device to pin it for.

    torch refuses that on a machine without an accelerator. In SGLang 0.5.12 `layers/logits_processor.py` does it for
    each request with `logprob_start_len`, and the scheduler dies; 0.5.23 checks first. Both do it in `lora/` for every
    batch. Pinning only makes copies to a device faster: without it the results are the same.

    SGLang's modules are changed rather than torch's functions: once a wrapper of `torch.tensor` is in the cached set of
    `torch.utils._device`, ``with torch.device(...)`` silently no longer reaches the real function.
    """

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("sglang.srt."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        source = spec.loader.get_data(spec.origin)
        if not any(asked in source for asked in _PINNED):
            return None
        loader = _PageableSource(fullname, spec.origin)
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


def _run_shadowed_sitecustomize():
    """Run the next `sitecustomize` on the path, which Python would have run without this file."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.append(_KernelStub())
    sys.meta_path.insert(0, _TorchvisionSchemas())
    sys.meta_path.insert(0, _NoPinnedMemory())

_run_shadowed_sitecustomize()
