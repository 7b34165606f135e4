"""GRPO on trajectories from Atropos.

Where verl's trainers generate rollouts, this trainer waits: the environments query the SGLang servers themselves, score
the replies and post them to the Trajectory API. ``fit_step`` is the algorithm; its steps follow below it, in order.
"""

import contextlib
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import open_dict
from tqdm import tqdm

from recipe.atropos.algorithm.advantages import KLCoefficient, RunningMoments, add_advantages
from recipe.atropos.algorithm.metrics import batch_metrics, mean_entropy, staleness_metrics
from recipe.atropos.algorithm.mini_batches import lay_out
from recipe.atropos.algorithm.off_policy import COMPARED, compare_with_engine, configure_bypass_mode
from recipe.atropos.algorithm.trajectories import has_several_rows, require_defined, shares_of
from recipe.atropos.checkpoint.resumption import model_identity
from recipe.atropos.checkpoint.shards import load_verified, save_state
from recipe.atropos.checkpoint.store import Checkpoints, step_of
from recipe.atropos.data.data_proto import real_rows, rows_to_data_proto
from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rollouts import write_rollouts
from recipe.atropos.data.rows import (
    ConversionReport,
    Row,
    RowLimits,
    VersionLimits,
    describe_drops,
    environment_name,
)
from recipe.atropos.data.sampling import SamplingCheck
from recipe.atropos.data.scored_group import Group
from recipe.atropos.errors import NothingToTrain, Preempted
from recipe.atropos.run.evaluations import heldout_scores, needs_evaluation, wait_until_evaluated
from recipe.atropos.run.record import RunRecord
from recipe.atropos.run.trackers import Trackers
from recipe.atropos.sources.numbered import DataSource
from recipe.atropos.sources.recorded import NoServers, RecordedSource
from recipe.atropos.sources.stock import open_source
from recipe.atropos.verl_ext.algorithm import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
    get_kl_controller,
    reduce_metrics,
)
from recipe.atropos.verl_ext.batch import DataProto
from recipe.atropos.verl_ext.driver import marked_timer, should_save_ckpt_esi
from recipe.atropos.watchdog import alarms
from recipe.atropos.watchdog.history import PREFIX, logprob_tolerance
from recipe.atropos.weight_sync.manager import build_manager
from recipe.atropos.workers.actor import ActorGroup

logger = logging.getLogger(__name__)

_EVALUATION_SLACK = 60.0  # seconds for the launcher to notice that an evaluation is due, and to report its end
_STEP_SHARE = 0.9  # of the launcher's step timeout, in which ranks must respond, so that a hung rank is named


class RayGRPOAtroposTrainer:
    """Trainer that fetches scored groups, trains with FSDP workers, pushes the weights and records the run.

    The policy's version is the number of updates so far (``global_steps``). It is active on every server before the
    first rollout, after every ``trainer.atropos.weight_sync.every``-th update, and after the last.
    """

    def __init__(self, config: Any, tokenizer: Any, vocab_size: int | None = None):
        """Set up; ``vocab_size`` is the model's, which may have, and sample, more tokens than its tokenizer."""
        self.config, self.tokenizer = config, tokenizer
        atropos = config.trainer.atropos
        self.advantage_moments = RunningMoments()
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl) if config.algorithm.use_kl_in_reward else None
        configure_bypass_mode(config)
        actor_rollout_ref = config.actor_rollout_ref
        self.batch_size = config.data.train_batch_size * actor_rollout_ref.rollout.n  # trajectories
        self.mini_batch_size = actor_rollout_ref.actor.ppo_mini_batch_size * actor_rollout_ref.rollout.n  # trajectories
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.limits = RowLimits.from_config(config, pad, vocab_size)
        self.sampling_check = SamplingCheck.from_config(config)
        self.logprob_tolerance = logprob_tolerance(atropos.logprob_tolerance, config.inference.dtype)
        self._alarms_logged: set[str] = set()
        self.checkpoints = Checkpoints(config.trainer.default_local_dir)
        self._model_identity = model_identity(config.actor_rollout_ref.model.path)
        self.total_training_steps = config.trainer.total_training_steps
        with open_dict(config):
            config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps
        kl = {} if self.kl_controller is None else {"kl_in_reward": KLCoefficient(self.kl_controller)}
        self.record = RunRecord(config.run.dir, {"advantage_moments": self.advantage_moments} | kl)
        self.metrics: dict[str, Any] = {}
        self._later: list[Callable[[], dict[str, float]]] = []  # metrics to compute while the ranks update
        self.timing_raw: dict[str, float] = {}
        self.global_steps, self._longest_step = 0, 0.0
        self.preempted = False  # by SIGUSR1: the step that is being trained is the last, and is saved
        self._saved_step = 0  # of the newest checkpoint that this process has saved or loaded

    def init_workers(self) -> None:
        """Start the actor's ranks under Ray, load the model, and find the servers to which its weights are pushed."""
        self.actor = ActorGroup(self.config)
        self.actor.check_shared(Path(self.config.trainer.default_local_dir))
        if self.config.trainer.atropos.replay:
            self.checkpoint_manager = NoServers()
            return
        self.actor.check_weight_names()
        vocab_size = self.limits.vocab_size or len(self.tokenizer)
        self.checkpoint_manager = build_manager(self.config, self.actor, vocab_size, self._log_probs_of)

    # ---------------------------------------------------------------- the algorithm

    def fit(self) -> None:
        """Train until ``total_training_steps``, from the newest checkpoint of the run folder if there is one."""
        self._load_checkpoint()
        self.record.begin()
        done, total = self.global_steps, self.total_training_steps
        with contextlib.ExitStack() as stack:
            self.trackers = stack.enter_context(Trackers(self.config, done))
            self.checkpoint_manager.update_weights(done)
            self.data_source = stack.enter_context(self._register(done))
            self.progress_bar = stack.enter_context(tqdm(total=total, initial=done))
            # From now on there may be something to save; before, SIGUSR1 ends this process at once.
            signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "preempted", True))
            try:
                for self.global_steps in range(done + 1, total + 1):
                    self.fit_step()
                self.global_steps = total + 1  # which is not trained
                self._end_if_preempted()
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the same command exports the model again
            finally:
                self.checkpoint_manager.onload_servers()
        self.record.write_summary()

    def fit_step(self) -> None:
        """One update of the policy."""
        self.metrics, self.timing_raw = {"training/global_step": self.global_steps}, {}
        self.actor.deadline = math.inf  # the wait for a batch may be longer than the step timeout
        self._end_if_preempted()
        with marked_timer("step", self.timing_raw):
            self.metrics |= self.checkpoint_manager.ensure_current(self.global_steps - 1, self._end_if_preempted)
            self._await_evaluation()
            batch = self._next_batch()
            self.actor.deadline = time.monotonic() + _STEP_SHARE * self.config.trainer.atropos.step_timeout
            self.checkpoint_manager.offload_servers()
            self._compute_log_probs(batch)
            self._compute_reference_log_probs(batch)
            self._compute_advantages(batch)
            self._update_actor(batch, meanwhile=self._describe)
            self._push_weights()
        self._collect_metrics()
        self._log_step()
        self._save_if_due()
        self.record.write_summary()  # a step whose checkpoint could not be saved is not reported

    @property
    def _is_last_step(self) -> bool:
        return self.global_steps >= self.total_training_steps

    # ---------------------------------------------------------------- the steps

    def _next_batch(self) -> DataProto:
        """Return the next batch that has a row to train on, padded to full mini-batches and balanced across ranks.

        Raises:
            DataSourceError: no batch arrived in time.
            NothingToTrain: nothing of ``max_empty_batches`` in a row could be trained on; the message has the reasons.
            SamplingMismatch: rows were sampled from a different distribution than the trainer computes.
        """
        atropos = self.config.trainer.atropos
        versions = VersionLimits(self.global_steps - 1, atropos.max_staleness)
        lost: dict[str, Counter[str]] = {}  # reasons by environment
        counts, fetched, empty, batch = Counter(), 0, 0, None
        while batch is None:
            with marked_timer("wait", self.timing_raw), self.record.waiting():
                number, groups = self.data_source.next_batch(self._poll_servers)
                fetched += len(groups)
            with marked_timer("convert", self.timing_raw):
                batch, report = self._batch_of(groups, versions)
            for name, reasons in report.dropped_by_environment.items():
                lost.setdefault(name, Counter()).update(reasons)
            counts.update(report.metrics())
            if batch is None:
                empty += 1
                logger.warning("batch %d has nothing to train on; dropped so far: %s", number, describe_drops(lost))
                self.data_source.batch_is_empty(number)
                if empty >= atropos.max_empty_batches:
                    what = f"trainer.atropos.max_empty_batches={empty} batches in a row had nothing to train on"
                    raise NothingToTrain(f"{what}; docs/data-format.md explains the reasons: {describe_drops(lost)}")

        self.record.totals.batches = number
        self.record.totals.empty_batches += empty
        self.record.totals.dropped = dict(sum(lost.values(), Counter(self.record.totals.dropped)))
        self.metrics |= {
            "atropos/batch": number,
            "atropos/empty_batches": empty,
            "atropos/batch_fill": sum(report.group_sizes) / self.batch_size,
            **counts,
            **self.data_source.metrics(),
        }
        self._groups_fetched = fetched
        self._check_sampling(batch)
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def _batch_of(
        self, groups: Sequence[Group], versions: VersionLimits | None = None
    ) -> tuple[DataProto | None, ConversionReport]:
        """Return the groups' rows in mini-batches of whole groups (None if no row can be trained on), and a report."""
        rows, report = read_groups(groups, self.limits, versions)
        if not rows:
            return None, report
        ordered, mini_batches, balance = lay_out(
            rows,
            report.group_sizes,
            self.mini_batch_size,
            ranks=self.actor.data_parallel_size(),
            multiple_of=self.actor.rows_multiple,
            balance=self.config.trainer.balance_batch,
        )
        batch = rows_to_data_proto(ordered, self.limits)
        batch.meta_info["mini_batches"] = mini_batches
        if has_several_rows(batch):
            require_defined(self.config)
        report.padding_rows = len(batch) - len(rows)
        self.metrics |= balance
        return batch, report

    def _check_sampling(self, batch: DataProto) -> None:
        """Count rows sampled differently from what the trainer computes; add ``row_temperature``, (B,), if needed."""
        columns, real = batch.non_tensor_batch, ~batch.non_tensor_batch["is_padding"]
        names = map(environment_name, columns["env_name"][real], columns["env_id"][real])
        self.metrics |= self.sampling_check.metrics(columns["sampling"][real].tolist(), list(names))
        temperatures = self.sampling_check.temperatures(batch.non_tensor_batch["sampling"].tolist())
        if temperatures is not None:
            batch.batch["row_temperature"] = torch.from_numpy(temperatures)

    def _poll_servers(self) -> None:
        """Update servers while waiting: no batch can come if they wait for weights, or serve their initial weights."""
        self._end_if_preempted()
        self.record.still_waiting()
        self.metrics |= self.checkpoint_manager.ensure_current(self.global_steps - 1, self._end_if_preempted)

    def _end_if_preempted(self) -> None:
        """If SIGUSR1 asked for the end, save the last trained step; this one has no batch yet. Raises Preempted."""
        if self.preempted:
            self.global_steps -= 1
            if self.global_steps != self._saved_step:  # also with save_freq=-1, else a run that is requeued begins anew
                self._save_checkpoint()
            raise Preempted(f"SIGUSR1: ends after step {self.global_steps}; the same command continues")

    def _await_evaluation(self) -> None:
        """Wait until the launcher has evaluated weights that are due for evaluation and that this step replaces.

        This is not done right before the push, so that a server restarted meanwhile can still get the active weights.

        Raises:
            NotEvaluated: the launcher did not report the evaluation in time.
        """
        settings, version = self.config.evaluation, self.checkpoint_manager.version
        if settings.evaluated_file and needs_evaluation(version, settings.every) and self._pushes:
            with marked_timer("evaluate", self.timing_raw), self.record.waiting():
                limit = settings.timeout + _EVALUATION_SLACK
                wait_until_evaluated(settings.evaluated_file, version, limit, self._poll_servers)

    def _compute_log_probs(self, batch: DataProto) -> None:
        """Add ``old_log_probs``, (B, R), of the policy before the update; later compare them with the engine's.

        In bypass mode they are the engine's, except for rows that came without logprobs.
        """
        engine = batch.batch.get("rollout_log_probs")
        correction = self.config.algorithm.rollout_correction
        lacking = ~batch.non_tensor_batch["has_log_probs"] & ~batch.non_tensor_batch["is_padding"]
        if not correction.bypass_mode:
            with marked_timer("old_log_prob", self.timing_raw):
                computed, mfu = self.actor.log_probs(batch)
            entropy = mean_entropy(computed.pop("entropys"), batch, self.config.actor_rollout_ref.actor)
            self.metrics |= {"actor/entropy": entropy, "perf/mfu/actor_infer": mfu}
            batch.batch.update(computed)
        elif lacking.any():
            batch.batch["old_log_probs"] = self.actor.log_probs(batch)[0]["old_log_probs"]
        if engine is None:
            return
        if "old_log_probs" in batch.batch:
            self._later.append(  # with the tensors of now, before the bypass and any rejection
                partial(compare_with_engine, batch.select(COMPARED), self.global_steps - 1, correction)
            )
        if correction.bypass_mode:
            known = torch.from_numpy(~lacking)[:, None]
            batch.batch["old_log_probs"] = torch.where(known, engine, batch.batch.get("old_log_probs", engine))

    def _compute_reference_log_probs(self, batch: DataProto) -> None:
        """Add ``ref_log_prob``, (B, R), if the loss or the reward needs it and not every row came with its own."""
        if self.actor.computes_reference and "ref_log_prob" not in batch.batch:
            with marked_timer("ref", self.timing_raw):
                batch.batch["ref_log_prob"] = self.actor.reference_log_probs(batch)

    def _compute_advantages(self, batch: DataProto) -> None:
        """Add rewards, off-policy correction and advantages, (B, R) each."""
        with marked_timer("adv", self.timing_raw):
            self.metrics |= add_advantages(
                batch, self.config.algorithm, self.config.trainer.atropos, self.advantage_moments, self.kl_controller
            )

    def _update_actor(self, batch: DataProto, meanwhile: Callable[[DataProto], object]) -> None:
        """Run the optimizer steps of the batch; if rejection left no token at all, only count the batch.

        ``meanwhile(batch)`` is called while the ranks are at work: what none of them waits for.
        """
        learned = batch.batch["response_mask"].bool().any(-1)
        if self.limits.needs_teacher:
            learned &= torch.from_numpy(batch.non_tensor_batch["has_teacher"])
        if not learned.any():
            logger.error("step %d: no token is left to train; the policy stays as it is", self.global_steps)
            self.metrics["atropos/batches_without_token"] = 1
            meanwhile(batch)
            return
        if has_several_rows(batch):
            batch.batch["trajectory_share"] = shares_of(batch)
        with marked_timer("update_actor", self.timing_raw):
            metrics = self.actor.update(batch, learned, partial(meanwhile, batch))
        self.metrics |= reduce_metrics(metrics)

    def _push_weights(self) -> None:
        if self._pushes:
            with marked_timer("update_weights", self.timing_raw), contextlib.suppress(Preempted):
                self.metrics |= self.checkpoint_manager.update_weights(self.global_steps, self._give_up) or {}
                self.data_source.weights_pushed(self.record.totals.batches)
        self.metrics["atropos/policy_version"] = self.checkpoint_manager.version

    def _give_up(self) -> None:
        """Raise Preempted if SIGUSR1 has made this step the last: the push that waits for a server is left out."""
        if self.preempted:
            raise Preempted

    @property
    def _pushes(self) -> bool:
        """Whether this step ends with a push of its weights; for one that SIGUSR1 makes the last, nobody samples."""
        every = self.config.trainer.atropos.weight_sync.every
        return not self.preempted and (self._is_last_step or self.global_steps % every == 0)

    def _describe(self, batch: DataProto) -> None:
        """Write text, scores and versions of every row to ``rollouts/STEP.jsonl``; compute the rows' metrics."""
        while self._later:
            self.metrics |= self._later.pop(0)()
        self._rows, self._rollouts = real_rows(batch), []
        if folder := self.config.trainer.rollout_data_dir:
            self._rollouts = write_rollouts(Path(folder), self.global_steps, self._rows, self.tokenizer)
        of_rows = compute_data_metrics(self._rows, use_critic=False)
        # Responses are padded to the longest in the batch, which verl takes for the configured maximum.
        self.metrics |= {name: value for name, value in of_rows.items() if not name.endswith("/clip_ratio")}
        self.metrics |= batch_metrics(self._rows) | staleness_metrics(self._rows, self.global_steps)

    def _collect_metrics(self) -> None:
        """Add what is known only after the update and the push, to the metrics and to the run's totals."""
        rows = self._rows
        self.metrics |= {
            **compute_timing_metrics(rows, self.timing_raw),
            **compute_throughout_metrics(rows, self.timing_raw, n_gpus=self.actor.world_size),
            **compute_variance_proxy_metrics(rows, gradient_norm=self.metrics.get("actor/grad_norm")),
        }
        groups = len(set(rows.non_tensor_batch["uid"]))
        self.record.totals.add_batch(
            score=self.metrics["atropos/mean_score"],
            groups=groups,
            dropped=self._groups_fetched - groups,
            sequences=len(rows),
            tokens=int(rows.batch["response_mask"].sum()),
            version=self.checkpoint_manager.version,
        )
        del self._rows  # before the wait for the next batch
        self._raise_alarms()

    def _raise_alarms(self) -> None:
        """Add the step's alarms to the metrics; log each alarm the first time it is raised."""
        raised = alarms.raised_by(self.metrics, self.logprob_tolerance, self.sampling_check.mode)
        for name in raised.keys() - self._alarms_logged:
            text = alarms.describe(name, raised[name], self.logprob_tolerance)
            logger.error("step %d: %s: %s", self.global_steps, name, text)
        self._alarms_logged |= raised.keys()
        self.metrics |= {f"{PREFIX}{name}": value for name, value in raised.items()}

    def _log_step(self) -> None:
        self.trackers.log(self.metrics, self.global_steps, heldout_scores(self.config.run.dir), self._rollouts)
        self.record.add_step(self.global_steps, self.metrics, self.timing_raw)
        self.progress_bar.set_postfix(score=f"{self.metrics['atropos/mean_score']:.3f}")
        self.progress_bar.update(1)

    # ---------------------------------------------------------------- batches, logprobs, checkpoints

    def _register(self, done: int) -> DataSource | RecordedSource:
        if replay := self.config.trainer.atropos.replay:
            return RecordedSource(replay, self.record.totals.batches)
        # A wait until the API takes a message shows; a trainer that is to end does not wait.
        return open_source(
            self.config, done, self.record.totals.batches, lambda: self.record.still_waiting() or not self.preempted
        )

    def _log_probs_of(self, rows: list[Row]) -> torch.Tensor:
        """Return the policy's logprobs of the rows' responses, (B, R) float32."""
        batch = rows_to_data_proto(rows, self.limits, multiple_of=self.actor.world_size * self.actor.rows_multiple)
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return self.actor.log_probs(batch)[0]["old_log_probs"][: len(rows)]

    def _load_checkpoint(self) -> None:
        """Resume from the newest complete checkpoint, or from ``trainer.resume_from_path``.

        Raises:
            ConfigurationError: there is no checkpoint at that path.
            CheckpointDamaged, ShardsError: a file is not as it was saved, or holds code.
        """
        trainer = self.config.trainer
        folder = self.checkpoints.to_resume(trainer)
        if folder is None:
            return
        self.global_steps = self._saved_step = step_of(folder)
        logger.warning("resuming from %s", folder)
        state = load_verified(folder, "data.pt")
        self.actor.load_checkpoint(str(folder / "actor"))
        self.record.load_state_dict(state)
        self.checkpoints.go_on_from(folder)
        if not self.checkpoints.continues(trainer):
            self.record.forget_counts()

    def _save_checkpoint(self) -> None:
        """Save a checkpoint; on DiskFull, nothing is left of it, but older ones may have been removed to make room."""
        self.actor.deadline = math.inf  # whatever is left of the step's
        keep, scores = self.config.trainer.max_actor_ckpt_to_keep, heldout_scores(self.config.run.dir)
        digests: dict[str, str] = {}
        about = self._model_identity, scores, self.record.totals.batches, digests
        with self.checkpoints.saving(self.global_steps, keep, *about) as folder:
            digests |= self.actor.save(folder, self.global_steps)
            save_state(folder / "data.pt", self.record.state_dict())
        self._saved_step = self.global_steps
        self.data_source.commit(self.checkpoints.oldest_batch())

    def _save_if_due(self) -> None:
        """Save every ``save_freq`` steps, after the last, and before the machine's end that verl knows of (ESI)."""
        trainer = self.config.trainer
        self._longest_step = max(self._longest_step, self.timing_raw["step"])
        if trainer.save_freq <= 0:
            return
        ends_soon = should_save_ckpt_esi(self._longest_step, redundant_time=trainer.esi_redundant_time)
        if self._is_last_step or self.global_steps % trainer.save_freq == 0 or ends_soon:
            with marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()
        self.record.add_seconds("save", self.timing_raw.get("save_checkpoint", 0.0))
