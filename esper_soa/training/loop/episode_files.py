"""The run folder of an episode that a simulator plays: a run of one round without an update."""

import time
from contextlib import closing

from esper_soa.agent.protocol import Agent
from esper_soa.config.settings import plain_settings, settings_from_mapping, settings_yaml
from esper_soa.env.step import EnvView, StepResult
from esper_soa.env.world import World
from esper_soa.runtime.ranks import SINGLE_PROCESS
from esper_soa.state import Decision, EnvState
from esper_soa.training.files.run_folder import open_run_folder, write_config
from esper_soa.training.files.session import Session
from esper_soa.training.loop.collect import Player
from esper_soa.training.loop.recorder import Facts
from esper_soa.training.loop.task import TaskRun
from esper_soa.training.results.answers import write_answers
from esper_soa.training.results.final_table import write_summary
from esper_soa.training.results.metrics import MetricsAccumulator


class EpisodeFiles:
    """Writes the folder of an episode in progress."""

    def __init__(self, settings: str, world: World, agent: Agent, run_dir: str) -> None:
        """settings: as a config.yaml has them; run_dir: "" = runs/<name>/<time>. Raises UserError
        where it cannot be written to.
        """
        played = {"rounds": 1, "control": "none", "track": [], "report": False}
        cfg = settings_from_mapping(plain_settings(settings) | played)
        self.world = world
        self.session = Session(open_run_folder(run_dir, cfg.name), verbose=0)
        player = Player(agent, None)
        self.task = TaskRun(cfg, self.session, world, player=player, ranks=SINGLE_PROCESS)
        write_config(self.session.folder, settings_yaml(cfg), [])
        self.task.files.write_records()
        self.task.files.recorder.begin(1)
        self.metrics = MetricsAccumulator(
            world.rules, world.setup.num_envs, world.setup.train_samples, kernels=world.kernels
        )
        self.steps = 0

    def add(self, observed: EnvView, decision: Decision, result: StepResult) -> None:
        """Count an env-step and put it into the tables, which waits for the device."""
        self.metrics.add_(observed, result)
        self.steps += 1
        recorder = self.task.files.recorder
        numbers = recorder.pack(Facts(observed, decision, result))
        if numbers is not None:
            recorder.emit(self.steps, numbers.cpu().numpy())

    def finish(self, state: EnvState) -> None:
        """Write the results; raises IncompleteError where something could not be written."""
        world = self.world
        left = world.rules.max_steps - self.steps
        if left:  # every episode has ended early
            self.metrics.skip_env_steps(left * world.setup.num_envs)
        result = self.metrics.read(state, world.reduction, world.settings)
        files = self.task.files
        seconds = {"collect_seconds": time.monotonic() - self.session.begin, "update_seconds": 0.0}
        with closing(self):
            files.recorder.end()
            files.recorder.flush()
            self.task.log(result, seconds, {"update": {}, "anomalies": []})
            files.save_hosts(result.hosts, 1)
            summary = self.task.summarise()
            folder = self.session.folder
            with self.session.write_errors.attempt(folder.summary.name):
                write_answers(folder.answers, summary.grown, summary.controls)
                write_summary(summary, folder.summary)
        self.session.finish()

    def close(self) -> None:
        """Write what is recorded; an episode that was left has its tables alone."""
        self.task.files.close()
        self.session.log.close()
