"""Asynchronous control client of one SGLang server.

Promises: every failure is an `InferenceError` that names the server, the endpoint and what the server said; nothing is
sent twice; no call waits longer than its time-out.

What was measured on SGLang 0.5.23, and on 0.5.12 where it is named, and holds wherever these calls are used:

* **In-flight requests** survive a push in the pause modes `retract` and `in_place`: each goes on after `resume`, and
  its reply carries `meta_info.weight_versions = [{"version", "start", "end"}, ...]`, the version of every output token;
  `meta_info.weight_version` is the version at the *end*. `abort` ends them with finish_reason "abort".
* **Only `retract` gives fresh KV** to them: it drops their cache, so flush_cache succeeds and the prefix is computed
  anew with the new weights. In `in_place` flush_cache fails while one is running.
* **Before 0.5.21 nothing gives fresh KV to them**: with a retracted request flush_cache fails too, until it is aborted
  (resumed without a flush, 0.5.12 served the prompt from keys of the old weights). `abort` is the one mode in which
  a push succeeds whatever runs; see `Capabilities.flushes_retracted`.
* **0.5.12 dies** of an update with ``flush_cache=True`` while it is paused (`retract`, `in_place`) and holds a request,
  of a tensor payload that it cannot read or whose shapes are wrong, and of a distributed update for a group that it
  does not know. A bare flush_cache only fails.
* `abort` after `in_place` waits for a request that will never end, and `resume` waits behind it: a deadlock. After
  `retract` it works. It takes a second whenever something runs: the server looks once a second.
* **A reply of 0.5.12 has one version**, the one at its end. In `abort` no reply spans a push, so it is that of all its
  tokens. `weight_versions` came with 0.5.19.
* **A refused update may have changed the weights**: in `in_place` an update that asks to flush loads the new weights,
  then answers 400, and the version stays the old one. After any failed push only a whole new one makes it true again.
* A paused server still answers `model_info`, updates and flushes; requests that arrive wait until `resume`.
  `health` does not see through a pause: the server generates a token to answer, waits 20 s and answers 503.
* The version before any update is the string "default" (or what ``--weight-version`` said).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import orjson
from safetensors import SafetensorError, safe_open

from recipe.atropos.errors import AtroposError

PauseMode = Literal["auto", "abort", "retract", "in_place"]


class InferenceError(AtroposError, RuntimeError):
    """A call to an inference server failed; `status` is None if no HTTP answer came."""

    def __init__(self, url: str, endpoint: str, message: str, status: int | None = None):
        self.url, self.endpoint, self.status, self.message = url, endpoint, status, message
        super().__init__(f"{url}{endpoint}: {f'HTTP {status}: ' if status else ''}{message}")


class ServerGone(InferenceError):
    """Nobody listens at the server's address, or the connection broke: it has ended, or is starting."""


@dataclass(frozen=True)
class Capabilities:
    """What a server says that it can do, read from its /openapi.json: versions are not compared."""

    version: str
    endpoints: frozenset[str]
    pause_modes: frozenset[str]
    generate_fields: frozenset[str] = frozenset()
    arguments: dict[str, Any] = field(default_factory=dict)  # it was started with: tp_size, dp_size, dtype, device, ...

    @property
    def weight_update_session(self) -> bool:
        """Whether tensor and distributed updates must stand between begin_weight_update and end_weight_update."""
        return "/begin_weight_update" in self.endpoints

    @property
    def flushes_retracted(self) -> bool:
        """Whether the cache can be flushed while retracted requests wait.

        No endpoint says so. 0.5.21 brought it together with the session of weight updates, whose endpoint is the sign
        (read in the sources of 0.5.12, 14, 16, 18 to 23). Should the sign be wrong, the flush fails, and with it the
        push: no old key is used.
        """
        return self.weight_update_session

    @property
    def forgets_adapters(self) -> bool:
        """Whether an adapter can be unloaded after a request for several answers (``n``) has named it.

        No endpoint says so. 0.5.22 brought it, and with it the field ``watermark`` of /generate, which is the sign
        (read in the sources of 0.5.12, 18, 20 to 23; 0.5.12 was seen to wait for ever). Should the sign be wrong, the
        push of an adapter too many has no answer in time, and fails.
        """
        return "watermark" in self.generate_fields

    def safe_pause_mode(self, wanted: PauseMode) -> PauseMode:
        """The mode in which a push can flush, whatever runs: for "auto" `retract` where it can, else `abort`.

        Raises:
            ValueError: `retract` is asked for and cannot flush, or the server does not know the mode.
        """
        mode = wanted
        if wanted == "auto":
            mode = "retract" if self.flushes_retracted else "abort"
        elif wanted == "retract" and not self.flushes_retracted:
            raise ValueError(
                f"SGLang {self.version} cannot flush its KV cache while retracted requests wait, so a push in mode "
                '"retract" would fail: set trainer.atropos.weight_sync.pause_mode to auto or abort, which end running '
                "requests there, or run SGLang 0.5.21 or later"
            )
        if mode not in self.pause_modes:
            raise ValueError(f"SGLang {self.version} has no pause mode {mode!r}, only {sorted(self.pause_modes)}")
        return mode


class SGLangClient:
    """Use it as ``async with SGLangClient(url, api_key) as client``.

    Args:
        url: base address, without ``/v1``.
        api_key: the key that the server was started with, if any.
        timeout: seconds that one call may take in all. Updates of large models need minutes.
        capabilities: what the server can do, where that is known already.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = 600.0,
        capabilities: Capabilities | None = None,
    ):
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._capabilities = capabilities

    async def __aenter__(self) -> Self:
        # A new connection for each call: on a kept one, a POST can meet a server that is just closing it, and whether
        # it was carried out would then be unknown. No limit: whoever generates sets the concurrency.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- state -----------------------------------------------------------------------------------------------------

    async def health(self, timeout: float = 25.0) -> bool:
        """Whether the server generates. Takes a second at least; false, not an error, while it cannot be reached."""
        try:
            await self._call("GET", "/health", timeout=timeout)
        except InferenceError as error:
            if error.status in (None, 503):
                return False
            raise
        return True

    async def model_info(self) -> dict[str, Any]:
        """The server's own description. After an update from disk, model_path and served_model_name are its folder."""
        return await self._call("GET", "/model_info")

    async def weight_version(self) -> str:
        """The version that the server says it serves."""
        info = await self.model_info()
        if "weight_version" not in info:
            raise InferenceError(self.url, "/model_info", f"no weight_version among {sorted(info)}: SGLang too old")
        return str(info["weight_version"])

    async def capabilities(self) -> Capabilities:
        """What this server can do; asked once."""
        if self._capabilities is None:
            api = await self._call("GET", "/openapi.json")
            server = await self._call("GET", "/server_info")
            schemas = api["components"]["schemas"]
            mode = schemas.get("PauseGenerationReqInput", {}).get("properties", {}).get("mode", {})
            self._capabilities = Capabilities(
                version=str(server.get("version", "unknown")),
                endpoints=frozenset(api["paths"]),
                pause_modes=frozenset(mode.get("enum", ())),
                generate_fields=frozenset(schemas.get("GenerateReqInput", {}).get("properties", ())),
                arguments=server,
            )
        return self._capabilities

    def forget_capabilities(self) -> None:
        """Ask again: another server may have taken this one's place."""
        self._capabilities = None

    # -- generation ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        input_ids: list[int] | list[list[int]],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool = True,
        **fields: Any,
    ) -> Any:
        """POST /generate. One reply, a dict, or a list for a list of prompts or ``n`` > 1.

        A reply has `output_ids` and `meta_info.output_token_logprobs` = [[logprob, token id, None], ...].
        The logprobs are those of softmax(logits / temperature) (at temperature 0: of softmax(logits)), before top-k and
        top-p.
        """
        return await self._call(
            "POST",
            "/generate",
            {
                "input_ids": input_ids,
                "sampling_params": sampling_params or {},
                "return_logprob": return_logprob,
                **fields,
            },
        )

    async def tokenize(self, text: str) -> list[int]:
        """POST /tokenize: the ids that the server's own tokenizer gives, without special tokens around them."""
        return (await self._call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]

    async def pause(self, mode: PauseMode) -> None:
        """POST /pause_generation; see the module's text for the modes. Pausing twice is no error.

        "auto" is `Capabilities.safe_pause_mode`; any other mode is sent as it is, also where a flush must fail in it.
        """
        if mode == "auto":
            mode = (await self.capabilities()).safe_pause_mode(mode)
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """POST /continue_generation. No error if nothing was paused."""
        await self._call("POST", "/continue_generation", {})

    async def abort_all(self) -> None:
        """End every request, running or waiting: their replies come with finish_reason "abort"."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Raises while requests run, and before SGLang 0.5.21 while retracted ones wait."""
        await self._call("POST", "/flush_cache")

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back to the device: "kv_cache", "weights". The contents are lost. Pause the server first."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take back what was released, without its contents. SGLang dies of a tag that was not released."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    # -- weights ---------------------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, model_path: str | Path, weight_version: str | int, flush_cache: bool = True
    ) -> None:
        """Load the weights in `model_path`, a folder that the server sees; then it reports `weight_version`.

        Unless paused, the server first waits until no request runs. Paused and holding a request, SGLang 0.5.12 dies of
        ``flush_cache=True``: leave it out there and call `flush_cache`, which only fails. A folder that the server does
        not see it takes for a name on the Hugging Face hub, looks there, and refuses: version and weights are then the
        old ones. A damaged file would kill it (it rolls back by reading the same file again), so those that can be seen
        from here are checked first. Names and shapes are not, by neither side: a missing tensor silently stays the old
        one.
        """
        for file in sorted(Path(model_path).glob("*.safetensors")):
            try:
                with safe_open(file, framework="numpy"):
                    pass  # opening compares the header with the size of the file
            except (SafetensorError, OSError) as error:
                raise InferenceError(
                    self.url, "/update_weights_from_disk", f"not sent, {file} is damaged ({error}): write it again"
                ) from error
        await self._call(
            "POST",
            "/update_weights_from_disk",
            {"model_path": str(model_path), "weight_version": str(weight_version), "flush_cache": flush_cache},
        )

    async def adapters(self) -> set[str]:
        """The names of the LoRA adapters that the server holds."""
        models = await self._call("GET", "/v1/models")
        return {model["id"] for model in models["data"] if model.get("parent")}

    async def begin_weight_update(self) -> None:
        """Open the session for tensor or distributed updates; does nothing on servers that know none (0.5.12).

        One that a trainer left open when it died is closed first.
        """
        if not (await self.capabilities()).weight_update_session:
            return
        try:
            await self._call("POST", "/begin_weight_update", {})
        except InferenceError as error:
            if "already open" not in error.message:
                raise
            await self._call("POST", "/end_weight_update", {})
            await self._call("POST", "/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close the session that `begin_weight_update` opened."""
        if (await self.capabilities()).weight_update_session:
            await self._call("POST", "/end_weight_update", {})

    async def post(self, endpoint: str, body: dict[str, Any]) -> Any:
        """Any other endpoint, under the same promises; for the weight transports."""
        return await self._call("POST", endpoint, body)

    # -- transport -------------------------------------------------------------------------------------------------

    async def _call(self, method: str, endpoint: str, body: Any = None, timeout: float | None = None) -> Any:
        if self._session is None:
            raise RuntimeError(f"SGLangClient({self.url!r}) is not open: use it with `async with`")
        limit = self.timeout if timeout is None else timeout
        try:
            async with self._session.request(
                method,
                self.url + endpoint,
                data=None if body is None else orjson.dumps(body),
                timeout=aiohttp.ClientTimeout(total=limit),
            ) as response:
                status, raw = response.status, await response.read()
        except TimeoutError:
            raise InferenceError(self.url, endpoint, f"no answer within {limit:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise ServerGone(self.url, endpoint, f"cannot connect ({error.os_error}); is the server up?") from error
        except aiohttp.ClientError as error:
            raise ServerGone(
                self.url, endpoint, f"the connection broke ({error!r}); the server may have died: see its log"
            ) from error
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = raw.decode(errors="replace").strip()
        if status in (401, 403):
            raise InferenceError(
                self.url,
                endpoint,
                f"{_message(answer)}: the API key is wrong or missing; give the server's own",
                status,
            )
        if status != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            raise InferenceError(self.url, endpoint, _message(answer), status)
        return answer


def _message(answer: Any) -> str:
    """The human-readable part of SGLang's various error bodies."""
    if isinstance(answer, dict):
        for key in ("message", "error", "detail"):
            if answer.get(key):
                return _message(answer[key])
    return str(answer) or "(empty answer)"
