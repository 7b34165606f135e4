"""Whether somebody has logged in to W&B here, as W&B itself decides it."""

import configparser
import contextlib
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

_HOST = "api.wandb.ai"


def wandb_login() -> tuple[str, str, bool]:
    """Return W&B's mode ("online", "offline", ...), its host, and whether there is a login to that host."""
    settings = _settings()
    host = urlsplit(settings.get("base_url", "")).netloc or _HOST
    logged_in = "api_key" in settings or "identity_token_file" in settings or _in_netrc(host)
    return settings.get("mode", "online"), host, logged_in


def _settings() -> dict[str, str]:
    """Return W&B's settings: the environment's, and those of the file to which ``wandb login --host`` writes."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        parser.read(Path(folder).expanduser() / "settings")
    settings = dict(parser["default"]) if parser.has_section("default") else {}
    prefix = "WANDB_"
    given = {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}
    return {name: value for name, value in (settings | given).items() if value}


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return False
