"""Where the services are: addresses in `services.json`, secrets apart in a 0600 file.

A laptop and a cluster differ only in these and in the run's config. `rl360 up` writes both files; a cluster's
operator writes them by hand and points `RL360_HOME` at the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson
from pydantic import Field, ValidationError

from rl360.config.run import explain
from rl360.errors import BadInput, Rl360Error
from rl360.store.data import Data


class Secrets(Data):
    """Never logged, never in flow parameters, artifacts or sandboxes."""

    token: str = Field(min_length=16, repr=False)
    s3_access_key: str = Field(repr=False)
    s3_secret_key: str = Field(repr=False)


class Services(Data):
    """Addresses of one deployment's services."""

    home: str
    prefect_api_url: str
    prefect_ui_url: str
    s3_endpoint: str
    s3_bucket: str
    gateway_url: str
    engine_urls: list[str] = Field(min_length=1)
    session_urls: list[str] = Field(min_length=1)
    sandbox_urls: list[str] = Field(min_length=1)
    trainer_url: str
    model_dir: str = Field(description="Hugging Face directory the engines were started with")

    def secrets(self) -> Secrets:
        """Read the secrets; a file that others can read is refused."""
        path = Path(self.home) / "secrets.json"
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
        except FileNotFoundError:
            raise Rl360Error(f"no secrets at {path}; start the services with `rl360 up`") from None
        if mode & 0o077:
            raise Rl360Error(f"{path} is readable by others (mode {mode & 0o777:o}); run `chmod 600 {path}`")
        try:
            return Secrets.model_validate(orjson.loads(data))
        except (orjson.JSONDecodeError, ValidationError):
            raise Rl360Error(
                f"{path} is not a secrets file; run `rl360 down` and `rl360 up` to make a new one"
            ) from None

    def auth_headers(self) -> dict[str, str]:
        """The bearer header every rl360 service asks for."""
        return {"Authorization": f"Bearer {self.secrets().token}"}


def home_dir() -> Path:
    """All local state: `$RL360_HOME`, else `.rl360` in the current directory."""
    return Path(os.environ.get("RL360_HOME", ".rl360")).absolute()


def load_services(home: Path | None = None) -> Services:
    """The services of `home`; one clear line when they were never started."""
    path = (home or home_dir()) / "services.json"
    try:
        return Services.model_validate(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        raise Rl360Error(f"no services known at {path}; run `rl360 up` first, or set RL360_HOME") from None
    except OSError as error:
        raise Rl360Error(f"cannot read {path} ({error.strerror}); set RL360_HOME to a folder of yours") from None
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{path}: not a services file ({error})") from None
    except ValidationError as error:
        raise BadInput(f"{path}: not a services file ({explain(error)})") from None


def service_token(token_file: Path | None = None) -> str:
    """The bearer token of this process: of `token_file`, else of the file `RL360_TOKEN_FILE` names, else that of the
    local home. A file that others can read is refused."""
    named = token_file or os.environ.get("RL360_TOKEN_FILE")
    path = Path(named) if named else home_dir() / "token"
    if not named and not path.exists():
        raise Rl360Error(
            f"no token: {path}, which `rl360 up` writes, is not there; name a 0600 file with --token-file "
            "or RL360_TOKEN_FILE"
        )
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Rl360Error(
            f"cannot read the token in {path} ({type(error).__name__}); name another file with --token-file, "
            "or run `rl360 up`"
        ) from None
    if mode & 0o077:
        raise Rl360Error(f"{path} is readable by others (mode {mode & 0o777:o}); run `chmod 600 {path}`")
    if len(token) < 16:
        raise Rl360Error(f"token in {path} is {len(token)} characters, need at least 16")
    return token
