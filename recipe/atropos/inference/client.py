"""Asynchronous control client of one SGLang server.

Guarantees: every failure is an `InferenceError` that names the server, the endpoint and the server's message; nothing
but a flush is sent twice; no call waits longer than its timeout.

The following was measured on SGLang 0.5.23, and on 0.5.12 where named, and holds wherever these calls are used:

* **In-flight requests** survive a push in the pause modes `retract` and `in_place`: each continues after `resume`, and
  its reply carries `meta_info.weight_versions = [{"version", "start", "end"}, ...]`, the version of every output token;
  `meta_info.weight_version` is the version at the *end*. `abort` ends them with finish_reason "abort".
* **Only `retract` gives them fresh KV**: it drops their cache, so flush_cache succeeds and the prefix is recomputed
  with the new weights. In `in_place` flush_cache fails while a request is running.
* **Before 0.5.21 no mode gives them fresh KV**: with a retracted request flush_cache fails too, until it is aborted
  (resumed without a flush, 0.5.12 served the prompt from keys of the old weights). `abort` is the only mode in which
  a push succeeds whatever is running; see `Capabilities.weight_update_session`.
* **0.5.12 crashes** on an update with ``flush_cache=True`` while it is paused (`retract`, `in_place`) and holds a
  request, on a tensor payload that it cannot read or whose shapes are wrong, and on a distributed update for an unknown
  group. A bare flush_cache only fails.
* `abort` after `in_place` waits for a request that will never end, and `resume` waits behind it: a deadlock. After
  `retract` it works. `abort` takes a second whenever requests are running: the server checks once a second.
* **A reply of 0.5.12 has one version**, the one at its end. In `abort` no reply spans a push, so it holds for all its
  tokens. `weight_versions` came with 0.5.19.
* **A refused update may have changed the weights**: in `in_place` an update that asks to flush loads the new weights,
  then answers 400, and the version stays the old one. After any failed push only a whole new one corrects it.
* A paused server still answers `model_info`, updates and flushes; requests that arrive wait until `resume`.
  `health` fails during a pause: the server tries to generate a token, waits 20 s and answers 503.
* The version before any update is the string "default" (or the value of ``--weight-version``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry, retry_if_exception, stop_after_attempt, stop_after_delay, wait_fixed

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.sockets import OwnServers

PauseMode = Literal["auto", "abort", "retract", "in_place"]


class InferenceError(AtroposError, RuntimeError):
    """A call to an inference server failed; `status` is None if no HTTP answer came."""

    def __init__(self, url: str, endpoint: str, message: str, status: int | None = None):
        self.url, self.endpoint, self.status, self.message = url, endpoint, status, message
        super().__init__(f"{url}{endpoint}: {f'HTTP {status}: ' if status else ''}{message}")


@dataclass(frozen=True)
class Capabilities:
    """What a server can do, read from its /openapi.json and /server_info; versions are not compared."""

    version: str
    endpoints: frozenset[str]
    pause_modes: frozenset[str]
    generate_fields: frozenset[str] = frozenset()
    arguments: dict[str, Any] = field(default_factory=dict)  # at launch: tp_size, dp_size, dtype, device, ...

    @property
    def weight_update_session(self) -> bool:
        """Whether tensor and distributed updates must be between begin_weight_update and end_weight_update.

        Such a server can also flush its cache while retracted requests wait. No endpoint reports that; 0.5.21
        introduced both (read in the sources of 0.5.12, 14, 16, 18 to 23). If the indicator is wrong, the flush fails,
        and with it the push: no stale key is used.
        """
        return "/begin_weight_update" in self.endpoints

    @property
    def forgets_adapters(self) -> bool:
        """Whether an adapter can be unloaded after a request for several samples (``n``) has named it.

        No endpoint reports it. 0.5.22 introduced it together with the field ``watermark`` of /generate, which serves
        as the indicator (read in the sources of 0.5.12, 18, 20 to 23; 0.5.12 was seen to wait forever). If the
        indicator is wrong, a push that must evict an adapter times out and fails.
        """
        return "watermark" in self.generate_fields

    def safe_pause_mode(self, wanted: PauseMode) -> PauseMode:
        """Return ``wanted``, or for "auto" a mode in which a push can always flush: `retract` if it can, else `abort`.

        Raises:
            ValueError: `retract` is wanted but cannot flush, or the server does not know the mode.
        """
        mode = wanted
        if wanted == "auto":
            mode = "retract" if self.weight_update_session else "abort"
        elif wanted == "retract" and not self.weight_update_session:
            raise ValueError(
                f"SGLang {self.version} cannot flush its KV cache while retracted requests wait, so a push in mode "
                '"retract" would fail: set trainer.atropos.weight_sync.pause_mode to auto or abort, which end running '
                "requests there, or run SGLang 0.5.21 or later"
            )
        if mode not in self.pause_modes:
            raise ValueError(f"SGLang {self.version} has no pause mode {mode!r}, only {sorted(self.pause_modes)}")
        return mode


class JsonClient:
    """Client of a service that takes and gives JSON. It holds no connection between two calls.

    Args:
        url: base address, without ``/v1``.
        api_key: the key that the server was started with, if any.
        timeout: seconds that one call may take in total. Updates of large models need minutes.
        own: the key is sent to no server of this machine that another user runs; see ``OwnServers``, and what it
            raises. False: it is that server's own key.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0, own: bool = True):
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connector = OwnServers if own and api_key else aiohttp.TCPConnector

    async def call_until_answered(self, seconds: float, method: str, endpoint: str, body: Any = None) -> Any:
        """Return the answer to a call, which is repeated for at most ``seconds`` while no HTTP answer comes."""
        silent = retry_if_exception(lambda error: isinstance(error, InferenceError) and error.status is None)
        retrying = AsyncRetrying(stop=stop_after_delay(seconds), wait=wait_fixed(0.5), retry=silent, reraise=True)
        return await retrying(self._call, method, endpoint, body)

    async def _call(self, method: str, endpoint: str, body: Any = None, timeout: float | None = None) -> Any:
        limit = self.timeout if timeout is None else timeout
        try:
            # A new connection for each call: the server may close a kept-alive one just as a POST is sent, and whether
            # it was executed would then be unknown.
            async with (
                aiohttp.ClientSession(
                    connector=self._connector(force_close=True),
                    headers=self._headers,
                    cookie_jar=aiohttp.DummyCookieJar(),  # which costs less for each call
                ) as session,
                session.request(
                    method,
                    self.url + endpoint,
                    data=None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
                    timeout=aiohttp.ClientTimeout(total=limit),
                ) as response,
            ):
                status, raw = response.status, await response.read()
        except TimeoutError:
            raise InferenceError(self.url, endpoint, f"no answer within {limit:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise InferenceError(self.url, endpoint, f"cannot connect ({error.os_error}); is the server up?") from error
        except aiohttp.ClientError as error:
            raise InferenceError(
                self.url, endpoint, f"the connection broke ({error!r}); the server may have died: see its log"
            ) from error
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = raw.decode(errors="replace").strip()
        if status != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            message = _message(answer)
            if status in (401, 403) and "API key" not in message:
                message += ": the API key is wrong or missing; give the server's own"
            raise InferenceError(self.url, endpoint, message, status)
        return answer


class SGLangClient(JsonClient):
    """Client of one server; it keeps what the server can do."""

    _capabilities: Capabilities | None = None

    # -- state -----------------------------------------------------------------------------------------------------

    async def health(self, timeout: float = 25.0) -> bool:
        """Return whether the server generates. Takes at least a second; False, not an error, if it is unreachable."""
        try:
            await self._call("GET", "/health", timeout=timeout)
        except InferenceError as error:
            if error.status in (None, 503):
                return False
            raise
        return True

    async def model_info(self) -> dict[str, Any]:
        """Return the server's description. After a disk update, model_path and served_model_name are its folder."""
        return await self._call("GET", "/model_info")

    async def weight_version(self) -> str:
        """Return the weight version that the server reports."""
        info = await self.model_info()
        if "weight_version" not in info:
            raise InferenceError(self.url, "/model_info", f"no weight_version among {sorted(info)}: SGLang too old")
        return str(info["weight_version"])

    async def capabilities(self, anew: bool = False) -> Capabilities:
        """Return what this server can do; fetched once, or ``anew``: another server may have taken this one's place."""
        if anew or self._capabilities is None:
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

    # -- generation ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        input_ids: list[int] | list[list[int]],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool = True,
        **fields: Any,
    ) -> Any:
        """POST /generate. Returns one reply, a dict, or a list for a list of prompts or ``n`` > 1.

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
        """POST /tokenize. Returns the ids from the server's own tokenizer, without added special tokens."""
        return (await self._call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]

    async def pause(self, mode: PauseMode) -> None:
        """POST /pause_generation; see the module docstring for the modes. Pausing twice is no error.

        "auto" uses `Capabilities.safe_pause_mode`; any other mode is sent as given, even if a flush must fail in it.
        """
        if mode == "auto":
            mode = (await self.capabilities()).safe_pause_mode(mode)
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """POST /continue_generation. No error if nothing was paused."""
        await self._call("POST", "/continue_generation", {})

    @retry(
        retry=retry_if_exception(lambda error: isinstance(error, InferenceError) and error.status == 400),
        wait=wait_fixed(0.2),
        stop=stop_after_attempt(4),
        reraise=True,
    )
    async def flush_cache(self) -> None:
        """Drop all cached prefixes. Raises while requests run and, before SGLang 0.5.21, while retracted ones wait.

        A reply leaves the server before its scheduler has dropped the request: for that, a refusal is tried again.
        """
        await self._call("POST", "/flush_cache")

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release memory on the device: "kv_cache", "weights". The contents are lost. Pause the server first."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Resume released memory, without its contents. SGLang crashes on a tag that was not released."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    # -- weights ---------------------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, model_path: str | Path, weight_version: str | int, flush_cache: bool = True
    ) -> None:
        """Load the weights in `model_path`, a folder that the server can read; then it reports `weight_version`.

        Unless paused, the server first waits until no request runs. When paused and holding a request, SGLang 0.5.12
        crashes on ``flush_cache=True``: pass False there and call `flush_cache`, which only fails. If the server cannot
        see the folder, it takes the path for a name on the Hugging Face Hub, looks there, and refuses; version and
        weights then stay as they were. A corrupt file crashes it: it rolls back by reading the same file again. Neither
        side checks names and shapes: a missing tensor silently keeps its old value.
        """
        await self._call(
            "POST",
            "/update_weights_from_disk",
            {"model_path": str(model_path), "weight_version": str(weight_version), "flush_cache": flush_cache},
        )

    async def adapters(self) -> set[str]:
        """Return the names of the LoRA adapters that the server holds."""
        models = await self._call("GET", "/v1/models")
        return {model["id"] for model in models["data"] if model.get("parent")}

    async def begin_weight_update(self) -> None:
        """Open the session for tensor or distributed updates; no-op on servers without sessions (0.5.12).

        A session that a trainer left open when it died is closed first.
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
        """POST to any other endpoint, with the same guarantees; for the weight transports."""
        return await self._call("POST", endpoint, body)


def _message(answer: Any) -> str:
    """Return the human-readable part of SGLang's various error bodies."""
    if isinstance(answer, dict):
        for key in ("message", "error", "detail"):
            if answer.get(key):
                return _message(answer[key])
    return str(answer) or "(empty answer)"
