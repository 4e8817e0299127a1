"""Defaults < file < environment < flags, and errors that say which value, from where."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from click.testing import CliRunner

from minserve.cli import main
from minserve.config import Config, ProfileName
from minserve.config_rules import validate
from minserve.profiles import PROFILES
from minserve.settings import FIELDS, Settings, SettingsError, load


def settings(tmp_path: Path, text: str = "", env: dict[str, str] | None = None, **flags: str) -> Settings:
    file = tmp_path / "minserve.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, env or {}, {name.replace("__", "."): value for name, value in flags.items()})


def test_later_sources_win_and_say_where_a_value_came_from(tmp_path: Path) -> None:
    text = "[engine]\nthreads = 1\nmax_num_seqs = 4\nblock_size = 32\n"
    env = {"MINSERVE_ENGINE_MAX_NUM_SEQS": "5", "MINSERVE_ENGINE_BLOCK_SIZE": "64", "PATH": "x"}
    got = settings(tmp_path, text, env, engine__block_size="8")
    assert (got.config.engine.threads, got.config.engine.max_num_seqs, got.config.engine.block_size) == (1, 5, 8)
    assert got.origins["engine.threads"].endswith("minserve.toml")
    assert got.origins["engine.max_num_seqs"] == "MINSERVE_ENGINE_MAX_NUM_SEQS"
    assert got.origins["engine.block_size"] == "--block-size"
    assert got.origins["server.port"] == "default"


def test_a_nested_section_keeps_its_own_defaults(tmp_path: Path) -> None:
    got = settings(tmp_path, "[pools.bulk]\nmax_queue = 7\n")
    assert got.config.pools.bulk.max_queue == 7
    assert got.config.pools.bulk.queue_timeout_s == 3600.0
    assert got.config.pools.interactive.token_share == 0.8


def test_keys_are_a_table(tmp_path: Path) -> None:
    got = settings(tmp_path, '[keys.web]\nsha256 = "ab"\nuser = "ann"\n')
    assert got.config.keys["web"].user == "ann"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nthread = 1\n", "unknown setting 'engine.thread'. Did you mean engine.threads?"),
        ("[engin]\nthreads = 1\n", "Did you mean engine"),
        ("[engine]\nthreads = '1'\n", r"engine.threads: Expected `int`, got `str`"),
        ("[engine]\nthreads = true\n", "engine.threads: Expected `int`, got `bool`"),
        ("[engine]\nmax_num_seqs = 0\n", "engine.max_num_seqs: Expected `int` >= 1"),
        ("[engine]\ndevice = 'tpu'\n", "engine.device is one of auto, cuda, cpu (got 'tpu')"),
        ("[loops]\nrepeat_window_s = inf\n", "loops.repeat_window_s: Expected `float` <= 1000000000.0"),
        ("[model]\nname = ''\n", "model.name: Expected `str` of length >= 1"),
        ("[local]\npools = 'bulk'\n", "local.pools: Expected `array`, got `str`"),
        ("[keys.web]\nuser = 'ann'\n", "keys: Object missing required field `sha256`"),
        ("[engine\n", "minserve.toml"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        settings(tmp_path, text)
    assert message in str(error.value)


def test_a_bad_file_of_another_name_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[engine]\nthread = 1\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"other\.toml: unknown setting 'engine\.thread'"):
        load(file, {}, {})


def test_bad_variables_and_flags_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Did you mean MINSERVE_ENGINE_THREADS"):
        settings(tmp_path, env={"MINSERVE_ENGINE_THREDS": "1"})
    with pytest.raises(SettingsError, match=r"MINSERVE_SERVER_PORT: server\.port"):
        settings(tmp_path, env={"MINSERVE_SERVER_PORT": "http"})
    with pytest.raises(SettingsError, match=r"--port: server\.port"):
        settings(tmp_path, server__port="70000")


def test_what_has_no_flag_of_its_own_is_the_command_lines(tmp_path: Path) -> None:
    for name, value in (("model.name", ""), ("pools.bulk.token_share", "2")):
        with pytest.raises(SettingsError, match=f"^the command line: {name}: Expected"):
            load(None, {}, {name: value})
    assert load(None, {}, {"model.name": "x"}).origins["model.name"] == "the command line"


def test_lists_are_separated_by_commas(tmp_path: Path) -> None:
    got = settings(tmp_path, env={"MINSERVE_SERVER_ALLOWED_ORIGINS": "https://a.example, https://b.example"})
    assert got.config.server.allowed_origins == ("https://a.example", "https://b.example")


def test_a_secret_is_not_echoed(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        settings(tmp_path, '[keys.web]\nuser = "ann"\nsecret = "ms-123"\n')
    assert "ms-123" not in str(error.value)


def test_a_missing_named_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        load(tmp_path / "none.toml", {}, {})


def test_every_field_has_a_default() -> None:
    assert len(FIELDS) > 40


def test_a_profile_sets_defaults_that_every_other_source_overrides(tmp_path: Path) -> None:
    text = 'profile = "bulk"\n[engine]\nmax_num_seqs = 7\n[pools.bulk]\nmax_queue = 9\n'
    env = {"MINSERVE_ENGINE_ITL_TARGET_MS": "90"}
    got = settings(tmp_path, text, env, engine__max_num_batched_tokens="600")
    engine, bulk = got.config.engine, got.config.pools.bulk
    assert (engine.max_num_seqs, engine.itl_target_ms, engine.max_num_batched_tokens) == (7, 90.0, 600)
    assert (bulk.max_queue, bulk.token_share, got.config.local.pool) == (9, 0.8, "bulk")
    assert got.origins["pools.bulk.token_share"] == "profile bulk"
    assert got.origins["pools.bulk.max_queue"].endswith("minserve.toml")
    assert got.origins["engine.block_size"] == "default"


def test_what_nobody_chose_gives_way_to_a_chosen_ceiling(tmp_path: Path) -> None:
    got = settings(tmp_path, limits__max_tokens="77")
    assert (got.config.limits.default_max_tokens, got.config.limits.default_completion_tokens) == (77, 16)
    assert got.origins["limits.default_max_tokens"] == "--max-tokens"
    assert not list(validate(got.config))
    seats = settings(tmp_path, "profile = 'interactive'\n[engine]\nmax_num_seqs = 4\n").config
    assert (seats.pools.bulk.max_num_seqs, seats.pools.interactive.max_num_seqs) == (4, 0)
    assert not list(validate(seats))


def test_a_chosen_value_above_its_ceiling_is_a_contradiction(tmp_path: Path) -> None:
    got = settings(tmp_path, limits__max_tokens="77", limits__default_max_tokens="78")
    assert "limits.default_max_tokens (78) is more than limits.max_tokens (77)" in " ".join(validate(got.config))


def test_who_waits_too_long_in_the_interactive_profile_gets_a_status_in_a_stream_too(tmp_path: Path) -> None:
    """The status line is held back in a queue that gives up before a keep-alive is due."""
    config = settings(tmp_path, 'profile = "interactive"\n').config
    assert config.pools.interactive.queue_timeout_s < config.timeouts.sse_keep_alive_s


def test_the_profile_itself_is_a_setting_like_any_other(tmp_path: Path) -> None:
    env = {"MINSERVE_PROFILE": "interactive"}
    got = settings(tmp_path, 'profile = "bulk"\n', env)
    assert (got.config.profile, got.origins["profile"]) == ("interactive", "MINSERVE_PROFILE")
    assert got.config.degradation.enabled
    assert settings(tmp_path, 'profile = "bulk"\n', env, profile="balanced").config == Config()
    with pytest.raises(SettingsError, match="profile is one of interactive, balanced, bulk"):
        settings(tmp_path, profile="fast")


def test_every_profile_has_its_values() -> None:
    assert set(PROFILES) == set(get_args(ProfileName))
    assert PROFILES[Config().profile] == {}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profiles_values_are_known_valid_and_without_contradictions(tmp_path: Path, name: str) -> None:
    for field, value in PROFILES[name].items():
        assert msgspec.convert(value, FIELDS[field].type) == value
    config = settings(tmp_path, profile=name).config
    assert validate(config) == []
    repeated = [field for field, value in PROFILES[name].items() if value == value_of(Config(), field)]
    assert not repeated


def value_of(config: Any, field: str) -> Any:
    for part in field.split("."):
        config = getattr(config, part)
    return config


def test_the_command_line_has_the_profile_as_a_flag_and_shows_what_it_sets() -> None:
    shown = CliRunner().invoke(
        main, ["config", "--profile", "bulk", "--max-num-seqs", "9"], env={"MINSERVE_CONFIG": None}
    )
    lines = {line.split()[0]: line for line in shown.output.splitlines()}
    assert lines["profile"].split() == ["profile", "'bulk'", "--profile"]
    assert lines["engine.max_num_batched_tokens"].endswith("profile bulk")
    assert lines["engine.max_num_seqs"].endswith("--max-num-seqs")
