"""Imports without garbage collections."""

import gc

import pytest

from recipe.atropos.utils.importing import gc_disabled


def test_importing_collects_no_garbage_and_restores_the_state():
    """And leaves nothing to look through later."""
    with gc_disabled():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
    gc.unfreeze()
    with pytest.raises(ImportError), gc_disabled():
        raise ImportError("on purpose")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
