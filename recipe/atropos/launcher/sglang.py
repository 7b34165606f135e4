"""The run's SGLang servers, and the gateway that is their single address for the environments.

Guarantees: the environments know only the gateway; a server or gateway keeps its port when it is restarted; a server
that never came up is an error, and only one that was up is restarted, or one that was lost with its node.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.gateway_client import GATEWAY_PORT, GatewayClient, GatewayError, gateway_command
from recipe.atropos.inference.lora_routing import ADAPTERS_KEPT
from recipe.atropos.inference.server import SGLangLaunch, sglang_flags, start_sglang, uses_gpu
from recipe.atropos.launcher.placement import COLOCATED_SHARE, on_gpus
from recipe.atropos.launcher.services import WATCH_SECONDS, RestartPolicy, Run
from recipe.atropos.terminal.progress import progress, say
from recipe.atropos.utils.hosts import cluster_address, reachable
from recipe.atropos.utils.process import Service, default_port, free_port, wait_until_healthy
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.sockets import port_is_free, reserve, taken

_GATEWAY_START = 60.0


@dataclass(frozen=True)
class InferenceServices:
    """Servers by name, and the gateway's URL for environments. Both stay the same when processes are restarted."""

    servers: dict[str, SGLangLaunch]
    gateway: str
    api_key: str = field(repr=False)

    @property
    def urls(self) -> list[str]:
        return [launch.url for launch in self.servers.values()]

    async def status(self) -> dict[str, Any] | None:
        """Return the gateway's status; None if it does not answer."""
        try:
            return await GatewayClient(self.gateway, self.api_key, timeout=0).fetch_status()
        except GatewayError:
            return None

    async def version(self) -> int | None:
        """Return the version of the admitted servers; None if there are none or the gateway does not answer."""
        status = await self.status()
        return status["version"] if status and any(s["state"] == "admitted" for s in status["servers"]) else None

    async def served_version(self) -> int:
        """Return the version of the admitted servers, as soon as there is one."""
        while (version := await self.version()) is None:
            await asyncio.sleep(WATCH_SECONDS)
        return version


def plan_servers(run: Run, lora: bool = True) -> dict[str, SGLangLaunch]:
    """Return the servers that ``inference`` asks for, by name, each with its own port, seed and GPUs.

    ``lora``: include the flags for an adapter, which requires the model and the adapter to exist.
    """
    config, model = run.config.inference, run.config.actor_rollout_ref.model
    ports = [free_port(config.host) if config.port is None else config.port + i for i in range(config.servers or 1)]
    launches, for_adapter = {}, lora_arguments(model) if lora else {}
    given = sglang_flags(OmegaConf.to_container(config.args, resolve=True))
    for i, port in enumerate(ports):
        # Servers with the same seed would sample the same answers to the same prompts.
        own = {"random_seed": run.config.seed + i, "trust_remote_code": model.trust_remote_code} | for_adapter | given
        launch = SGLangLaunch(
            model_path=model.path,
            python=config.python,
            host=config.host,
            port=port,
            device=run.config.trainer.device if config.device == "auto" else config.device,
            dtype=config.dtype,
            api_key=run.api_key,
            mem_fraction_static=config.mem_fraction_static,
            extra_args=own,
        )
        if uses_gpu(launch):
            share = config.mem_fraction_static or (COLOCATED_SHARE if config.colocated else None)
            launch = replace(launch, extra_args=on_gpus(run.config, own, i), mem_fraction_static=share)
        launches["sglang" if len(ports) == 1 else f"sglang-{i}"] = launch
    return launches


def lora_arguments(model: DictConfig) -> dict[str, Any]:
    """Return SGLang's flags for adapter-only LoRA sync of ``actor_rollout_ref.model``; empty without that."""
    if not model.lora_rank or model.lora.merge:
        return {}
    # Imported here: they take seconds, which a launcher without an adapter does not need.
    import torch
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = model.get("trust_remote_code", False)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model.path, trust_remote_code=trusted), trust_remote_code=trusted
        )
        adapter = add_adapter(net, model)
    layers = [name for name, layer in net.named_modules() if isinstance(layer, LoraLayer)]
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.r,
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "max_loras_per_batch": ADAPTERS_KEPT,
        "max_loaded_loras": ADAPTERS_KEPT,
    }


def add_adapter(net: Any, model: DictConfig) -> Any:
    """Add the adapter of ``actor_rollout_ref.model`` to a model, as the ranks do; return PEFT's configuration of it.

    Raises:
        ConfigurationError: PEFT finds no layer of ``target_modules``.
    """
    from peft import LoraConfig, PeftConfig, get_peft_model

    if model.get("lora_adapter_path"):
        adapter = PeftConfig.from_pretrained(model.lora_adapter_path)
    else:
        named = OmegaConf.to_container(OmegaConf.masked_copy(model, ["target_modules", "exclude_modules"]))
        adapter = LoraConfig(r=model.lora_rank, **named)
    try:
        get_peft_model(net, adapter, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigurationError(f"actor_rollout_ref.model.target_modules={model.target_modules}: {error}") from error
    return adapter


def plan_inference(run: Run, lora: bool = True) -> InferenceServices:
    """Return the servers as `plan_servers`, and the gateway on the port that is configured, 9001 or a free one."""
    config, launches = run.config.inference, plan_servers(run, lora)
    used = {*given_ports(run.config).values(), *(launch.port for launch in launches.values())}
    port = config.gateway_port or default_port(GATEWAY_PORT, config.host, used)
    return InferenceServices(launches, f"http://{reachable(config.host)}:{port}", run.api_key)


def command_of_gateway(run: Run, inference: InferenceServices) -> list[str]:
    longest = run.config.trainer.atropos.weight_sync.timeout
    return gateway_command(inference.gateway, run.config.inference.host, inference.urls, longest)


def given_ports(config: DictConfig) -> dict[str, int]:
    """Return all ports that the configuration sets, by what they are for."""
    inference = config.inference
    ports = {
        "api.port": config.api.port,
        "inference.gateway_port": inference.gateway_port,
        "sessions.port": config.sessions.port,
    }
    if inference.port is not None:
        ports["inference.port"] = inference.port
        ports |= {f"inference.port of server {i}": inference.port + i for i in range(1, inference.servers or 1)}
    return {key: port for key, port in ports.items() if port is not None}


def check_ports(config: DictConfig) -> None:
    """Raise ConfigurationError, which names all, if ports that the configuration sets are taken, or set twice."""
    ports, problems = given_ports(config), []
    for key, port in ports.items():
        host = config.api.host if key == "api.port" else config.inference.host
        same = [other for other in ports if ports[other] == port]
        if len(same) > 1:
            problems.append(f"{' and '.join(same)}: both are {port}; give another, or null for a free one")
        elif port > 65535:
            problems.append(f"{key}={port}: the highest is 65535; give a lower inference.port")
        elif not port_is_free(port, host):
            problems.append(str(taken(host, port, key)))
    if problems:
        raise ConfigurationError("\n".join(dict.fromkeys(problems)))


async def start_inference(run: Run) -> InferenceServices:
    """Start the servers and the gateway, without waiting for them to be healthy.

    Raises:
        LaunchError: a server cannot be started as asked.
        ConfigurationError: the cluster has no room for what Ray places, or something is wrong with its nodes.
        ServiceFailed, Preempted: as ``Run.check``, while Ray looks for nodes.
    """
    inference = plan_inference(run)
    servers = inference.servers if run.config.inference.placement == "ray" else {}
    programs = [name for spec in run.plan.specs.values() if spec.placement == "ray" for name in spec.services]
    if cluster_address(run.config.ray_kwargs.ray_init):
        await _join_cluster(run, servers, programs)
    for name, launch in servers.items():
        inference.servers[name] = run.cluster.placed(name, launch)
    run.reserved["gateway"] = reserve(
        run.config.inference.host, urlsplit(inference.gateway).port, "inference.gateway_port"
    )
    for name in inference.servers:
        run.add(_start_server(run, inference, name))
    _start_gateway(run, inference)
    if servers:  # a node may be lost before they are up; an error of their own would repeat
        _enable_restarts(run, inference, recovers=lambda status: status < 0)
    return inference


async def _join_cluster(run: Run, servers: dict[str, SGLangLaunch], programs: list[str]) -> None:
    """Check the nodes of the cluster, if a service or a rank may be on another, and wait until Ray has some for these
    services. Raises as ``start_inference``.
    """
    # Imported here: Ray takes seconds.
    import ray

    from recipe.atropos.launcher.cluster_check import TOKEN, check_nodes
    from recipe.atropos.launcher.on_ray import Cluster

    run.cluster, names, findings = Cluster(run.config, servers, programs), [*servers, *programs], []
    if names or sum(node["Alive"] for node in ray.nodes()) > 1:
        with progress("the nodes of the Ray cluster are checked"):
            findings = await asyncio.to_thread(check_nodes, run.config, pairs=False)
    for found in findings:
        if found.check == TOKEN and found.problem:
            say(f"the cluster has no token, so that {found.problem}", "ray", "bold yellow", width=0)
    wrong = [f"node {found.node}: {found.problem}" for found in findings if found.problem and found.check != TOKEN]
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    if not names:  # the launcher needs Ray no more
        run.cluster.close()
        run.cluster = None
        return
    with progress(f"Ray looks for nodes for {', '.join(names)}"):
        for name in names:
            while run.cluster.awaited(name):
                run.check()
                await asyncio.sleep(WATCH_SECONDS)


def _start_server(run: Run, inference: InferenceServices, name: str) -> Service:
    if run.config.inference.placement == "ray":
        return run.cluster.start_server(name, inference.servers[name], run.files.log(name))
    return start_sglang(inference.servers[name], log_path=run.files.log(name), name=name, env=run.variables)


def _restart_server(run: Run, inference: InferenceServices, name: str) -> Service:
    """Start a server again: on its node, or on another one where that is lost. Then gateway and trainer, which know
    servers by their URLs, are ended, and started again by their own policies, which do not count it. The trainer has
    the time of a push to save its step.
    """
    if run.config.inference.placement == "ray":
        launch = run.cluster.placed(name, inference.servers[name])
        if launch.url != inference.servers[name].url:
            inference.servers[name] = launch
            run.complete.inference.urls = inference.urls
            for each in ("gateway", "trainer"):
                run.restart_policies[each].moved |= run.services[each].poll() is None
            run.services["gateway"].stop(grace=0.0)
            run.end_trainer()
            asyncio.get_running_loop().call_later(
                run.config.trainer.atropos.weight_sync.timeout, run.services["trainer"].stop, 0.0
            )
    return _start_server(run, inference, name)


def _start_gateway(run: Run, inference: InferenceServices) -> Service:
    command, key = command_of_gateway(run, inference), {API_KEY_VARIABLE: run.api_key}
    return run.start("gateway", command, url=inference.gateway, **key)


async def inference_healthy(run: Run, inference: InferenceServices) -> float:
    """Wait until every server generates and the gateway answers; from then on, restart them when they end.

    Returns the seconds that the servers took.

    Raises:
        ServiceFailed: a service ended or is not up in time (servers: ``inference.start_timeout`` seconds).
        OtherUsersServer: another user listens at a server's port.
    """
    await wait_until_healthy(run.services["gateway"], inference.status, _GATEWAY_START)
    seconds = 0.0
    for name in inference.servers:
        timeout = max(run.config.inference.start_timeout - seconds, 1.0)
        seconds += await wait_until_healthy(
            partial(run.services.__getitem__, name),
            lambda name=name: serves(run, inference.servers[name].url),  # another, once it is placed elsewhere
            timeout,
            key="inference.start_timeout",
        )
    _enable_restarts(run, inference)
    return seconds


async def serves(run: Run, url: str) -> bool:
    """Return whether a server answers that it is healthy."""
    run.check()
    return await SGLangClient(url, run.api_key).health()


def _awaited(run: Run, name: str) -> str:
    if run.config.inference.colocated and run.files.servers_offloaded.exists():
        return "when the trainer releases its memory"
    return run.cluster.awaited(name) if run.config.inference.placement == "ray" else ""


def _enable_restarts(
    run: Run, inference: InferenceServices, recovers: Callable[[int], bool] = lambda status: True
) -> None:
    """Set the restart policies; a colocated server's restart waits while the trainer holds the GPU memory."""
    limit = run.config.inference.max_restarts
    for name in inference.servers:
        run.restart_policies[name] = RestartPolicy(
            partial(_restart_server, run, inference, name),
            limit,
            kind="sglang",
            awaited=partial(_awaited, run, name),
            recovers=recovers,
        )
    run.restart_policies["gateway"] = RestartPolicy(
        partial(_start_gateway, run, inference), limit, kind="gateway", recovers=recovers
    )
