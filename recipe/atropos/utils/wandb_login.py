"""Whether somebody has logged in to W&B here, as W&B itself decides it."""

from urllib.parse import urlsplit


def wandb_login() -> tuple[str, str, bool]:
    """Return W&B's mode ("online", "offline", ...), its host, and whether there is a usable login to that host.

    Called before this process tracks anything; W&B, which keeps what it has read, forgets it before and after.
    """
    import wandb  # imported here: it takes a second
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib.wbauth import authenticate_session

    wandb.teardown()
    try:
        settings = wandb_setup.singleton().settings
        login = authenticate_session(host=settings.base_url, source="", prompt=False, update_session=False)
    except (wandb.Error, UnicodeDecodeError):  # a key of another form; a damaged file
        return "online", "W&B", False
    finally:
        wandb.teardown()
    return settings.mode, urlsplit(settings.base_url).netloc, login is not None
