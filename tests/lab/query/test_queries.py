"""The ten questions of docs/queries.md, answered by SQL and by the tensors that training used."""

import json
import os
import re
from collections import Counter, defaultdict
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import correlation

import pyarrow
import pytest
import torch
from pyarrow import parquet

from esper_soa.config.agent import PolicyConfig, ScheduleConfig
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.settings import settings_yaml
from esper_soa.lab.telemetry.table_files import table_files
from esper_soa.system.errors import UserError
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.vocabulary import BLUEPRINT_NAMES, LIVE_STAGES, OP_NAMES, STAGE_NAMES, Op, Stage
from tests.builders.lanes import some_of
from tests.builders.recording_agent import Witnessed, witnessed_round
from tests.builders.report_runs import line, make_run, write_round
from tests.builders.tiny_runs import fresh, records, settings

pytest.importorskip("duckdb", reason="extra query")
from esper_soa.lab.query import command as query  # noqa: E402
from esper_soa.lab.query.database import VIEWS, QueryError, open_database  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "queries.md"
ENVS = 3
ROUNDS = 2
STEPS = 24
SLOTS = ("r0c0", "r0c1")
SETTINGS = settings(
    envs=ENVS,
    rounds=ROUNDS,
    steps=STEPS,
    gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
    lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
    policy=PolicyConfig(
        schedule=ScheduleConfig(germinate=[1, 16], advance=[1, 4, 10], fossilize=12)
    ),
)
QUESTIONS = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module", params=some_of(["random", "schedule"], "schedule"))
def player(request: pytest.FixtureRequest) -> str:
    """Random play prunes much and fossilizes nothing; a schedule the other way round."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(player: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked")
    cfg = replace(SETTINGS, policy=replace(SETTINGS.policy, name=player))
    RunFolder(path).config.write_text(settings_yaml(cfg))
    fresh(cfg, path)
    return path


@pytest.fixture(scope="module")
def rounds(player: str) -> list[Witnessed]:
    """The same rounds, played by hand."""
    world = build_world(SETTINGS, torch.device("cpu"))
    agent = rule_player(player, "policy.name", SETTINGS.policy, world.setup)
    return [witnessed_round(world, agent, number) for number in range(ROUNDS)]


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[tuple]]:
    """What the questions of the page, and then the views' first, are answered."""
    database = open_database([folder])
    return [database.execute(asked).fetchall() for asked in QUESTIONS]


def test_1_and_2_accuracy_and_reward_by_round_and_of_every_host(
    folder: Path, answers: list[list[tuple]], rounds: list[Witnessed]
) -> None:
    assert list(table_files(folder, "steps")) == [1, 2], "rounds count from 1"
    ends = [played.states[-1] for played in rounds]
    accuracy = [float(state.signals.val_accuracy.mean()) for state in ends]
    reward = [float(state.totals.reward.mean()) for state in ends]
    rolling = [accuracy[0], sum(accuracy) / 2]
    assert answers[0] == list(zip((1, 2), accuracy, reward, rolling, strict=True))
    hosts = []
    for number, state in enumerate(ends, 1):
        told = (state.signals.val_accuracy, state.totals.reward, state.totals.fossilized)
        rows = zip(*(one.tolist() for one in told), strict=True)
        hosts += [(number, env, *row) for env, row in enumerate(rows)]
    assert answers[1] == hosts


@dataclass
class Life:
    """A seed, followed by hand; of its events the env-steps."""

    slot: int
    blueprint: int
    germinated: int
    blended: int | None = None
    fossilized: int | None = None
    pruned: int | None = None

    def follow(self, stage: int, step: int) -> None:
        if stage >= Stage.BLENDING and stage <= Stage.FOSSILIZED and self.blended is None:
            self.blended = step
        if stage == Stage.FOSSILIZED and self.fossilized is None:
            self.fossilized = step
        if stage not in LIVE_STAGES and self.pruned is None:
            self.pruned = step

    @property
    def fate(self) -> str:
        return "fossilized" if self.fossilized else "pruned" if self.pruned else "unfinished"


def lives(played: Witnessed) -> dict[int, list[Life]]:
    """The seeds of each env in order of germination."""
    found: dict[int, list[Life]] = {env: [] for env in range(ENVS)}
    here: dict[tuple[int, int], Life] = {}
    for step, state in enumerate(played.states, 1):
        for env in range(ENVS):
            for slot, stage in enumerate(state.slots.stage[env].tolist()):
                if stage == Stage.EMPTY:
                    here.pop((env, slot), None)
                    continue
                if (env, slot) not in here:
                    here[env, slot] = Life(slot, int(state.slots.blueprint[env, slot]), step)
                    found[env].append(here[env, slot])
                here[env, slot].follow(stage, step)
    return found


def test_3_fates_of_seeds(player: str, answers: list[list[tuple]], rounds: list[Witnessed]) -> None:
    expected = [
        (number, env, seed, SLOTS[slot], BLUEPRINT_NAMES[blueprint], *events, life.fate)
        for number, played in enumerate(rounds, 1)
        for env, seeds in lives(played).items()
        for seed, life in enumerate(seeds, 1)
        for slot, blueprint, *events in [astuple(life)]
    ]
    assert ("fossilized" if player == "schedule" else "pruned") in {row[-1] for row in expected}
    assert answers[2] == expected


def test_4_what_the_policy_does(answers: list[list[tuple]], rounds: list[Witnessed]) -> None:
    expected = []
    for number, played in enumerate(rounds, 1):
        chosen = Counter(OP_NAMES[op] for action in played.actions for op in action.op.tolist())
        done: Counter[str] = Counter()
        for action, state in zip(played.actions, played.states, strict=True):
            pairs = zip(action.op.tolist(), state.signals.last_success.tolist(), strict=True)
            done.update(OP_NAMES[op] for op, success in pairs if success)
        expected += [
            (number, op, chosen[op], done[op], chosen[op] / (ENVS * STEPS)) for op in sorted(chosen)
        ]
    assert answers[3] == expected


def test_5_paid_for_what(folder: Path, answers: list[list[tuple]], rounds: list[Witnessed]) -> None:
    found = answers[4]
    for number, played in enumerate(rounds, 1):
        paid = sum(paid for round_, _, paid in found if round_ == number)
        assert paid == pytest.approx(float(played.rewards().sum()))
    told = records(folder / "metrics.jsonl")
    for number, term, paid in found:
        assert paid == pytest.approx(told[number - 1]["reward_terms"][term] * ENVS)


def test_6_how_slots_spend_their_time(answers: list[list[tuple]], rounds: list[Witnessed]) -> None:
    expected = []
    for number, played in enumerate(rounds, 1):
        codes = torch.stack([view.state.slots.stage for view in played.views]).flatten()
        stages = Counter(STAGE_NAMES[stage] for stage in codes.tolist())
        expected += [(number, one, stages[one], stages[one] / len(codes)) for one in sorted(stages)]
    assert answers[5] == expected


def test_7_what_each_seed_adds_in_the_end(
    player: str, folder: Path, answers: list[list[tuple]], rounds: list[Witnessed]
) -> None:
    episodes = records(folder / "episodes.jsonl")
    found = answers[6]
    for number, env, slot, blueprint, contribution, shapley in found:
        place = SLOTS.index(slot)
        slots = rounds[number - 1].views[STEPS - 1].state.slots
        episode = next(one for one in episodes if (one["round"], one["env"]) == (number, env))
        assert shapley == episode["shapley"][place]
        assert contribution == float(slots.contribution[env, place])
        assert blueprint == BLUEPRINT_NAMES[slots.blueprint[env, place]]
    told = sum(bool(share) for one in episodes for share in one["shapley"])
    assert len(found) >= told
    assert found or player == "random"


def test_8_fates_of_blueprints(answers: list[list[tuple]], rounds: list[Witnessed]) -> None:
    fates: dict[str, Counter[str]] = defaultdict(Counter)
    for played in rounds:
        for seeds in lives(played).values():
            for life in seeds:
                fates[BLUEPRINT_NAMES[life.blueprint]].update(["germinated", life.fate])
    assert [row[:4] for row in answers[7]] == [
        (name, fates[name]["germinated"], fates[name]["fossilized"], fates[name]["pruned"])
        for name in sorted(fates)
    ]


def test_9_gates_refuse(player: str, answers: list[list[tuple]], rounds: list[Witnessed]) -> None:
    path = {Stage.GERMINATED: "G1", Stage.TRAINING: "G2", Stage.BLENDING: "G3", Stage.HOLDING: "G5"}
    passed = Counter[str]()
    refused = Counter[str]()
    for played in rounds:
        for view, action, state in zip(played.views, played.actions, played.states, strict=False):
            for env in range(ENVS):
                op = int(action.op[env])
                slot = int(action.slot[env])
                before = view.state.slots.stage[env].tolist()
                after = state.slots.stage[env].tolist()
                if op in (Op.ADVANCE, Op.FOSSILIZE) and not bool(state.signals.last_success[env]):
                    refused[path[before[slot]]] += 1
                order = list(path) + [Stage.FOSSILIZED]
                for was, now in zip(before, after, strict=True):
                    if was in path and now in order:
                        passed.update(
                            path[stage] for stage in order[order.index(was) : order.index(now)]
                        )
    names = sorted({*passed, *refused})
    assert answers[8] == [(gate, refused[gate], passed[gate]) for gate in names]
    assert passed["G1"]
    assert refused if player == "random" else passed["G5"]


def test_10_whether_the_reward_says_what_we_want_and_runs_are_summed_up(
    folder: Path, answers: list[list[tuple]], rounds: list[Witnessed]
) -> None:
    ends = [played.states[-1] for played in rounds]
    reward = [float(value) for state in ends for value in state.totals.reward]
    accuracy = [float(value) for state in ends for value in state.signals.val_accuracy]
    assert answers[9] == [(pytest.approx(correlation(reward, accuracy)), ENVS * ROUNDS)]
    told = records(folder / "metrics.jsonl")
    asked = "select rounds, final_accuracy, germinated, pruned from runs"
    sums = [sum(line["seeds"][fate] for line in told) for fate in ("germinated", "pruned")]
    expected = [(ROUNDS, told[-1]["accuracy"]["mean"], *sums)]
    assert open_database([folder]).execute(asked).fetchall() == expected


# --- of runs that have left less


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder of two runs: one cut off in its second line, one that has nothing yet."""
    for name in ("0", "1"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "config.yaml").write_text(f"rounds: 1\nseed: {name}\n")
    (tmp_path / "sweep" / "1" / "metrics.jsonl").touch()
    (tmp_path / "sweep" / "0" / "metrics.jsonl").write_text('{"round":1}\n{"round":2,"accur')
    hosts = [f'{{"round":{number},"env":{env}}}\n' for number in (1, 2) for env in range(4)]
    (tmp_path / "sweep" / "0" / "episodes.jsonl").write_text("".join(hosts))
    return tmp_path / "sweep"


def test_every_view_and_question_answers_for_any_run_and_for_several(begun: Path) -> None:
    for runs in ([begun], [begun / "1"]):
        database = open_database(runs)
        for view in VIEWS:
            assert database.execute(f"select * from {view}").description[0][0] == "run"
        for asked in QUESTIONS:
            database.execute(asked).fetchall()
    page = PAGE.read_text()
    assert all(f"| `{name}` | {view['question']} |" in page for name, view in VIEWS.items())
    database = open_database([begun])
    assert ("seed", "1", "1") in database.execute(QUESTIONS[-1]).fetchall()
    assert database.execute("select run, round from rounds").fetchall() == [("0", 1)]
    (begun / "none").mkdir()
    with pytest.raises(UserError, match=r"config\.yaml"):
        open_database([begun / "none"])


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Status, output and messages of the command."""
    with pytest.raises(SystemExit) as ended:
        query.main(list(words))
    return int(ended.value.code or 0), *capsys.readouterr()


def test_a_question_without_quotes_or_folder_is_told_how_it_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["runs", "select", "*"], ["select * from runs"]):
        status, _, told = asked(capsys, *words)
        assert status == 2
        assert 'esper-query RUN "select * from runs"' in told


def test_without_a_question_the_command_lists_the_views_and_what_they_answer(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, _ = asked(capsys, str(begun), "format=json")
    assert status == 0
    listed = [json.loads(one) for one in told.splitlines()]
    assert listed == [{"view": name, "question": view["question"]} for name, view in VIEWS.items()]


def test_the_command_prints_csv_and_json(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select round, count(*) as hosts from episodes group by round order by round"
    run = str(begun / "0")
    assert asked(capsys, run, sql, "format=csv")[1].splitlines() == ["round,hosts", "1,4", "2,4"]
    _, told, _ = asked(capsys, run, sql, "format=json")
    assert json.loads(told.splitlines()[1]) == {"round": 2, "hosts": 4}
    _, told, _ = asked(capsys, run, "select date '2026-01-31' as day", "format=json")
    assert json.loads(told) == {"day": "2026-01-31"}
    odd = "select 0/0 a, [1, 'inf'::double] a, 1.25::decimal(9, 2) a_2, map {1: 'nan'::double} b"
    _, told, _ = asked(capsys, run, odd, "format=json")
    assert json.loads(told) == {"a": None, "a_3": [1.0, None], "a_2": 1.25, "b": {"1": None}}
    assert not re.search("NaN|Infinity", told)
    _, told, _ = asked(capsys, run, "select 'a' || chr(27) || '[2J' as x")
    assert "\x1b" not in told, "a table does nothing to the terminal"
    brackets = "select '[/foo]' as \"[red]\", '[bold]' as b"
    assert all(one in asked(capsys, run, brackets)[1] for one in ("[/foo]", "[red]", "[bold]"))
    status, told, _ = asked(capsys, run, sql, "limit=1")
    assert (status, "1 rows more" in told) == (0, True)
    assert "rows more" not in asked(capsys, run, sql, "limit=2")[1]
    assert "1 rows more: limit=51" in asked(capsys, run, "select unnest(range(51)) as row")[1]
    assert "seed_lifecycle" in asked(capsys, run)[1]


def some_run(path: Path, number: int) -> Path:
    """A run folder with one round, whose one line of metrics is of round `number`."""
    run = make_run(path, [line(number, 40.0)])
    write_round(run, 1, envs=2, steps=6)
    return run


def test_names_of_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    for number, name in enumerate(("run1", "run[1]", "r*", "run?", "r's"), 1):
        database = open_database([some_run(tmp_path / name, number)])
        assert database.sql("select round from rounds").fetchall() == [(number,)]
        assert database.sql("select count(*) from steps").fetchall() == [(12,)]
        assert database.sql("select current_setting('threads')").fetchall() == [(2,)]


def test_a_folder_with_blanks_is_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(some_run(tmp_path / "my runs", 1).parent))
    assert asked(capsys, "~/my runs")[::2] == (0, "")


def test_a_file_that_was_cut_off_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = some_run(tmp_path / "run", 1)
    whole = table_files(run, "steps")[1]
    cut = whole.with_name("round_000002.parquet")
    cut.write_bytes(whole.read_bytes()[:-9])
    pipe = whole.with_name("round_000003.parquet")
    os.mkfifo(pipe)
    foreign = whole.with_name("round_000004.parquet")
    foreign.write_bytes(b"PAR1" + b"\x15" * 40 + b"\x20\0\0\0PAR1")
    others = {"run": pyarrow.array(["x"]), "STEP": pyarrow.array([1]), "op": pyarrow.array([1])}
    odd = [whole.with_name(f"round_{place:06d}.parquet") for place in range(5, 5 + len(others))]
    for path, (name, values) in zip(odd, others.items(), strict=True):
        parquet.write_table(pyarrow.table({name: values, "step": pyarrow.array([1])}), path)
    assert open_database([run]).sql("select count(*) from steps").fetchall() == [(12,)]
    told = [f"query    without {pipe}: "]
    told += [f"query    without a file: {path}: " for path in (cut, foreign, *odd)]
    found = zip(caplog.messages, told, strict=True)
    assert all(one.startswith(words) for one, words in found)
    assert "\n" not in "".join(caplog.messages)


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{outside}')",
        "copy (select 1) to '{outside}'",
        "attach '{outside}' as other",
        "copy (select 1) to '.tmp/there'",
        "select * from read_text('{run}/link')",
        "set enable_external_access = true",
        "set threads = 1",
        "set log_query_path = '{outside}'",
    ],
)
def test_sql_reads_and_writes_in_the_folders_of_the_runs_alone(
    tmp_path: Path, sql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = some_run(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tmp").mkdir()
    outside = tmp_path / "run2.txt"
    outside.write_text("not of a run")
    if "link" in sql:
        (run / "link").symlink_to(outside)
    with pytest.raises(QueryError):
        open_database([run]).execute(sql.format(outside=outside, run=run)).fetchall()
    assert outside.read_text() == "not of a run"


def test_sql_reads_anywhere_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = some_run(tmp_path / "run", 1)
    (tmp_path / "notes.txt").write_text("not of a run")
    sql = f"select content from read_text('{tmp_path / 'notes.txt'}')"
    assert asked(capsys, str(run), sql)[0] == 1
    assert "not of a run" in asked(capsys, str(run), sql, "files=any")[1]


def test_a_table_has_a_row_up_to_the_limit_and_numbers_of_six_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [(1234.56789, None, "x"), (3, 0.5, "[y]"), (1, 2, 3)]
    query.show(rows, ("a", "b", "c"), query.SETTINGS | {"limit": "2"})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "",
        "  a         b     c",
        f" {'─' * 21}",
        "  1234.57         x",
        "  3         0.5   [y]",
        "",
        "1 rows more: limit=3 shows all",
    ]
    query.show([("x" * 500,)], ("a",), query.SETTINGS)
    assert capsys.readouterr().out.count("x") == 500, "a long text is folded, not cut"
