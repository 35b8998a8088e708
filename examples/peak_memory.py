"""Peak memory of tensors, on any device, by a dispatch mode that follows every storage an operation makes."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(tree: object) -> list[torch.UntypedStorage]:
    """Those of all tensors in nested arguments."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class PeakMemory(TorchDispatchMode):
    """Bytes of storages that live at the same time among those made inside the block."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, int] = {}  # live storages: their number
        self.changes: list[tuple[int, int]] = []  # (number, bytes), negative where it goes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}  # a view of a weight is nothing new
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self.known:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage):
        key = storage._cdata
        self.known[key] = len(self.changes)
        self.changes.append((self.known[key], storage.nbytes()))
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int):
        self.changes.append((self.known.pop(key), -size))

    @property
    def peak(self) -> int:
        """Most bytes at one time."""
        return self.peak_beyond(())

    def peak_beyond(self, tensors: tuple[torch.Tensor, ...]) -> int:
        """Most bytes at one time, without these tensors, which live on."""
        left_out = {self.known.get(tensor.untyped_storage()._cdata) for tensor in tensors}
        live = peak = 0
        for number, size in self.changes:
            live += size if number not in left_out else 0
            peak = max(peak, live)
        return peak
