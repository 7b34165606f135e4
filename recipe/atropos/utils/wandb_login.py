"""Whether somebody has logged in to W&B here, as W&B itself decides it."""

import os
from urllib.parse import urlsplit

from pydantic import ValidationError


def wandb_login() -> tuple[str, str, bool]:
    """Return W&B's mode ("online", "offline", ...), its host, and whether there is a usable login to that host.

    Called before this process tracks anything; W&B, which keeps what it has read, forgets it before and after.
    """
    import wandb  # imported here: it takes a second
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib.wbauth import authenticate_session

    wandb.teardown()
    mode, host, login = os.environ.get("WANDB_MODE") or "online", "W&B", None
    try:
        settings = wandb_setup.singleton().settings
        mode, host = settings.mode, urlsplit(settings.base_url).netloc
        login = authenticate_session(host=settings.base_url, source="", prompt=False, update_session=False)
    except (wandb.Error, ValidationError, UnicodeDecodeError):
        pass  # a value or key of another form, or a damaged file, is no login; W&B says so where it is used
    finally:
        wandb.teardown()
    return mode, host, login is not None
