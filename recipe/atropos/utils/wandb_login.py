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
    mode, url = os.environ.get("WANDB_MODE") or "online", "https://W&B"
    try:
        settings = wandb_setup.singleton().settings
        mode, url = settings.mode, settings.base_url
        login = authenticate_session(host=url, source="", prompt=False, update_session=False)
    except (wandb.Error, ValidationError, UnicodeDecodeError):  # a value or key of another form; a damaged file
        login = None
    finally:
        wandb.teardown()
    return mode, urlsplit(url).netloc, login is not None
