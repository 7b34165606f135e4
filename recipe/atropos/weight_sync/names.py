"""Check that every tensor of the served checkpoint is pushed, under its name and in its shape there.

SGLang skips an unknown name with a log line at most, and keeps the tensor that it has; a tensor of another shape
crashes its scheduler. So names and shapes are compared before training, which needs no tensor data, and again during
each push. Allowed differences:

- **tied embeddings**: if one of two tied tensors is missing on a side, the other one must be there;
- **derived buffers**: a buffer that the checkpoint lacks is not pushed, because a server computes it itself after
  loading the checkpoint (MiniMax: the decays of its linear attention);
- **tensors that the model's class ignores**: buffers of older checkpoints (``rotary_emb.inv_freq`` of each layer), and
  names that match its ``_keys_to_ignore_on_load_unexpected`` (layers for multi-token prediction).
"""

import re
from collections.abc import Iterable, Iterator

import torch

from recipe.atropos.tensors.format import CheckpointFormat, Shapes
from recipe.atropos.weight_sync.servers import WeightPushError

_LISTED = 5  # names in an error


class WeightNamesError(WeightPushError):
    """The tensors of a push differ from those of the served checkpoint; lists them."""


class PushedNames:
    """Names and shapes of every push: those of ``streamed``, except buffers that the servers derive.

    Raises:
        WeightNamesError: ``checkpoint``, read from ``path``, has other names or shapes.
    """

    def __init__(self, streamed: CheckpointFormat, checkpoint: Shapes, path: str):
        self.path = path
        self.shapes = {
            name: shape for name, shape in streamed.shapes.items() if name in checkpoint or name not in streamed.buffers
        }
        self._derived = streamed.shapes.keys() - self.shapes.keys()
        self._streamed = streamed
        self.compare(checkpoint, path)

    def compare(self, checkpoint: Shapes, path: str) -> None:
        """Raise WeightNamesError if the checkpoint of ``path`` differs from the push beyond the allowed differences."""
        partner = self._streamed.tied | {source: name for name, source in self._streamed.tied.items()}
        ignored = re.compile("|".join(f"(?:{pattern})" for pattern in self._streamed.ignored) or "(?!)")
        missing = [
            name
            for name in checkpoint.keys() - self.shapes.keys()
            if partner.get(name) not in self.shapes and not ignored.search(name)
        ]
        unknown = [name for name in self.shapes.keys() - checkpoint.keys() if partner.get(name) not in checkpoint]
        reshaped = [
            f"{name} {list(shape)}, there {list(checkpoint[name])}"
            for name, shape in self.shapes.items()
            if checkpoint.get(name, shape) != shape
        ]
        problems = [
            f"{len(found)} tensors {what}: {some(found)}"
            for found, what in (
                (missing, "of the checkpoint would not be pushed"),
                (unknown, "would be pushed that the checkpoint does not have"),
                (reshaped, "would be pushed in another shape"),
            )
            if found
        ]
        if problems:
            raise WeightNamesError(
                f"the servers' checkpoint {path} and what the trainer pushes are not the same tensors, and SGLang "
                f"would keep old weights without an error: {'; '.join(problems)}. Give a checkpoint of this "
                "architecture, as transformers' save_pretrained writes it, as actor_rollout_ref.model.path"
            )

    def checked(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights``, except buffers that the servers derive.

        Raises:
            WeightNamesError: at an unexpected tensor, or at the end if tensors are missing.
        """
        left = dict(self.shapes)
        for name, tensor in weights:
            if name in self._derived:
                continue
            expected = left.pop(name, None)
            if expected != tensor.shape:
                known = self.shapes.get(name)
                wanted = "no such tensor" if known is None else "it once" if expected is None else list(known)
                raise WeightNamesError(
                    f"the push holds {name} {list(tensor.shape)}, the checkpoint {self.path} has {wanted}; "
                    "the version is not complete"
                )
            yield name, tensor
        if left:
            raise WeightNamesError(
                f"the push ended without {len(left)} of {len(self.shapes)} tensors: {some(left)}; the version "
                "is not complete"
            )


def some(names: Iterable[str]) -> str:
    """Return the first names in sorted order, and the number of the others."""
    names = sorted(names)
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
