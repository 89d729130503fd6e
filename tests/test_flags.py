"""The command line's words, frozen: scripts depend on them, so changing one is a decision and not an accident."""

from __future__ import annotations

import re

import pytest
import typer

from longctx.cli.app import app

MODEL_FLAGS = {"--dtype", "--weights", "--max-model-len", "--rope-scaling"}
MEMORY_FLAGS = {"--kv-format", "--kv-memory", "--device-memory", "--memory-fraction", "--chunk-tokens"}
VARIANT_FLAGS = {"--variant", "--window", "--sinks", "--local-chunk"}
SAMPLING_FLAGS = {
    *("--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop"),
    *("--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--logprobs"),
}

COMMANDS = {
    "run": {
        *VARIANT_FLAGS,
        "--attention",
        *MODEL_FLAGS,
        *MEMORY_FLAGS,
        "--kv-factors",
        *SAMPLING_FLAGS,
        "--prompt",
        "--prompt-file",
        "--ask",
        "--batch",
        "--out",
        "--chat",
        "--raw",
        "--load-format",
        "--unverified-model",
        "--deterministic",
        "--json",
    },
    "serve": {
        *VARIANT_FLAGS,
        "--attention",
        *MODEL_FLAGS,
        *MEMORY_FLAGS,
        "--kv-factors",
        "--load-format",
        "--unverified-model",
        "--deterministic",
        "--host",
        "--port",
        "--served-model-name",
        "--chat-template",
        "--api-key-file",
        "--cors-origin",
        "--max-body",
        "--request-timeout",
        "--itl-target-ms",
        "--max-running",
        "--max-queue",
        "--drain-seconds",
        "--jobs-dir",
        "--job-ttl",
        "--max-jobs",
        "--max-running-jobs",
        "--ping-seconds",
        "--log-format",
        "--log-prompts",
    },
    "plan": {
        *VARIANT_FLAGS,
        *MODEL_FLAGS,
        *MEMORY_FLAGS,
        "--tokens",
        "--concurrency",
        "--geometry",
        "--weight-bytes",
        "--tier",
        "--json",
    },
    "pull": {"--list", "--json"},
    "eval": {
        *VARIANT_FLAGS,
        "--attention",
        "--url",
        "--api-key",
        "--tokenizer",
        "--lengths",
        "--depths",
        "--tasks",
        "--haystack",
        "--samples",
        "--seed",
        "--max-tokens",
        "--warm",
        "--control",
        "--chat",
        "--raw",
        "--max-model-len",
        "--rope-scaling",
        "--chunk-tokens",
        "--kv-format",
        "--kv-factors",
        "--kv-memory",
        "--dtype",
        "--weights",
        "--load-format",
        "--out",
        "--json",
    },
    "bench": {
        *VARIANT_FLAGS,
        "--attention",
        "--lengths",
        "--tokens",
        "--repeats",
        "--against",
        "--trace",
        "--speedup",
        "--profile",
        "--max-model-len",
        "--chunk-tokens",
        "--kv-format",
        "--kv-factors",
        "--kv-memory",
        "--dtype",
        "--weights",
        "--load-format",
        "--out",
        "--json",
    },
    "route-sim": {
        "--users",
        "--turns",
        "--replicas",
        "--start-tokens",
        "--turn-tokens",
        "--shared-tokens",
        "--load",
        "--cache-tokens",
        "--prefill-rate",
        "--seed",
        "--out",
        "--json",
    },
}
"""Every command and its flags. Extend it on purpose, with a line in CHANGELOG.md."""

ARGUMENTS = {
    "run": ["MODEL"],
    "serve": ["MODEL"],
    "plan": ["[MODEL]"],
    "pull": ["NAME..."],
    "eval": ["NAME", "[MODEL]"],
    "bench": ["NAME", "[MODEL]"],
    "route-sim": [],
}

GLOBAL_FLAGS = {"--version"}


def flags_of(command: typer.core.TyperCommand | typer.core.TyperGroup) -> set[str]:
    """Every spelling of every option, the negative ones included; `--help` is everywhere."""
    options = [p for p in command.params if p.param_type_name == "option"]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)} - {"--help"}


def arguments_of(command: typer.core.TyperCommand) -> list[str]:
    return [str(p.metavar or p.name) for p in command.params if p.param_type_name == "argument"]


ROOT_COMMAND = typer.main.get_command(app)


def test_the_commands_are_these() -> None:
    assert set(ROOT_COMMAND.commands) == set(COMMANDS)
    assert flags_of(ROOT_COMMAND) == GLOBAL_FLAGS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_these_flags(name: str) -> None:
    command = ROOT_COMMAND.commands[name]
    assert flags_of(command) - {f"--no-{flag[2:]}" for flag in COMMANDS[name]} == COMMANDS[name]
    assert arguments_of(command) == ARGUMENTS[name]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_flags_are_spelled_alike_and_explained(name: str) -> None:
    for param in ROOT_COMMAND.commands[name].params:
        for flag in (*param.opts, *param.secondary_opts):
            if flag.startswith("-"):
                assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", flag), f"{name} {flag}"
        assert param.help or param.name == "help", f"{name} {param.name} has no help"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_says_what_it_does(name: str) -> None:
    assert (ROOT_COMMAND.commands[name].help or "").strip()
