"""Convert a model's tensors to the names and shapes of its checkpoint, which every server can load.

transformers 5 renames modules and packs the experts of MoE models when it loads a checkpoint; ``save_pretrained``
reverses this for the whole model at once. This module reverses it for one group of tensors at a time (usually one
tensor), so a push never holds more of the model than that.
"""

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from recipe.atropos.errors import AtroposError

Shapes = dict[str, tuple[int, ...]]
TENSOR_NAMES = "tensor_names.json"
"""File in a training checkpoint with the names in the trained model's ``CheckpointFormat.shapes``."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that SGLang fuses, in the order of their rows, by the name of the fused layer."""
# Biases of routers and decays of state space models: float32 parameters in SGLang 0.5.23 (srt/models).
_FP32_IN_SERVERS = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")


class CheckpointError(AtroposError, RuntimeError):
    """The names and shapes of a checkpoint cannot be read; the message names it."""


class CheckpointFormat:
    """Checkpoint names and shapes of the tensors of a model that ``from_pretrained`` loaded, before it is wrapped.

    ``ignored``: patterns of names that a checkpoint may have but that the model's class does not load.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._conversions = getattr(model, "_weight_conversions", None) or []
        reverse = [conversion.reverse_transform() for conversion in reversed(self._conversions)]
        self._converters = [transform for transform in reverse if isinstance(transform, WeightConverter)]
        self._state: Shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._group_sizes = Counter(map(self._group_of, self._state))
        self._buffers = [name for name, _ in model.named_buffers() if name in self._state]
        self._tied = model.all_tied_weights_keys
        derived = [name for name, _ in model.named_buffers() if name not in self._state]
        self.ignored = [
            *sorted(model._keys_to_ignore_on_load_unexpected or ()),
            r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",  # of each layer, in older checkpoints
            *(rf"^{re.escape(name)}$" for name in derived),
        ]

    @classmethod
    def of_unloaded(cls, model: PreTrainedModel, names: Iterable[str]) -> "CheckpointFormat":
        """Build for a model that was not loaded (the meta device will do); ``names`` are those of its checkpoint."""
        conversions = get_model_conversion_mapping(model)
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        state = model.state_dict()
        for name in names:  # like from_pretrained, keep only the conversions that match a name
            rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
        return cls(model)

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, tensor) for ``weights``, given as (state-dict name, tensor)."""
        if not self._conversions:
            yield from weights
            return
        pending: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in weights:
            group = self._group_of(name)
            pending[group][name] = tensor
            del tensor  # do not keep a group that was sent while the next one is gathered
            if len(pending[group]) == self._group_sizes[group]:
                converted = revert_weight_conversion(self._model, pending.pop(group))
                while converted:
                    first = next(iter(converted))
                    yield first, converted.pop(first)

    def _group_of(self, name: str) -> str:
        """Return a key shared by all state-dict tensors that one conversion turns into checkpoint tensors."""
        return rename_source_key(name, [], self._converters)[0] if self._converters else name

    @cached_property
    def shapes(self) -> Shapes:
        """Output of ``stream`` for the whole state dict; raises ValueError if two tensors would have the same name."""
        named = [(name, tuple(tensor.shape)) for name, tensor in self.stream(self._empty(self._state))]
        shapes = dict(named)
        if len(shapes) < len(named):
            raise ValueError(f"two tensors of a {self._model.config.model_type} model have one name in its checkpoint")
        return shapes

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names in ``shapes`` of tensors that are not trained: the buffers in the state dict."""
        return frozenset(name for name, _ in self.stream(self._empty(self._buffers)))

    @cached_property
    def fp32(self) -> frozenset[str]:
        """Names in ``shapes`` of tensors that servers keep in float32 even if the model has another dtype."""
        patterns = [*(self._model._keep_in_fp32_modules_strict or ()), *_FP32_IN_SERVERS]
        kept = re.compile("|".join(rf"(?:^|\.){pattern}(?:$|\.)" for pattern in patterns))
        return frozenset(name for name in self.shapes if kept.search(name))

    @cached_property
    def tied(self) -> dict[str, str]:
        """Names in ``shapes`` of tied tensors, each mapped to the name of the tensor that it is tied to."""
        return {self._renamed(name): self._renamed(other) for name, other in self._tied.items()}

    def _renamed(self, name: str) -> str:
        return next(self.stream(self._empty([name])))[0]

    def _empty(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.empty(self._state[name], device="meta")) for name in names)


def read_shapes(model: str | Path) -> Shapes:
    """Return names and shapes of a checkpoint's tensors, without their data; ``model``: a folder or a cached hub name.

    Raises:
        CheckpointError: there is neither a safetensors nor a pytorch_model.bin file, or it cannot be read.
    """
    # transformers looks for them in the same order.
    forms = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    file = next((file for name in forms if (file := model_file(model, name)) is not None), None)
    if file is None:
        raise CheckpointError(
            f"{model}: no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} there, whole or in parts, so that the names of its "
            "tensors cannot be compared with those that are pushed; give a checkpoint in Hugging Face format"
        )
    shapes: Shapes = {}
    try:
        parts = [str(file)]
        if file.suffix == ".json":
            parts, _ = get_checkpoint_shard_files(str(model), str(file), local_files_only=True)
        for part in parts:
            if part.endswith(".safetensors"):
                with safe_open(part, framework="pt") as opened:
                    shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            else:
                tensors = torch.load(part, map_location="meta", weights_only=True)
                shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file}: the names of its tensors cannot be read: {error}") from error
    return shapes


def model_file(model: str | Path, name: str) -> Path | None:
    """Return the path of a model's file, in its folder or in the hub's cache; None if it is in neither."""
    try:
        found = cached_file(str(model), name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except OSError:  # neither a folder nor a valid hub name, or not in the cache
        return None
    return None if found is None else Path(found)
