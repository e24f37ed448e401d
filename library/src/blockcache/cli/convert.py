"""The verb `policy convert`: what other code wrote, as files of ours."""

from __future__ import annotations

import os

import click

from blockcache.cli import arguments as arg
from blockcache.files import check_writable
from blockcache.models.policy_files import check_new

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin")  # of RDT


def _new(path: str) -> str:
    check_new(path)
    check_writable(path, directory=True)
    return path


@click.command()
@click.argument("source", metavar="CHECKPOINT")
@click.argument("output", metavar="OUT", type=arg.Checked("place", _new))
@click.option(
    "--steps", type=arg.SIZE, default=100, help="Of a folder of schedules: denoising steps of one generation."
)
@click.option("-S", "--updates", type=arg.COUNT, help="Of a folder with several schedules: the one with S updates.")
@click.option("--metric", help="Of a folder with several schedules: the one by this metric.")
@click.option(
    "--last", is_flag=True, help="Of a folder of schedules: every block at the last step too, as their code runs."
)
def convert(source: str, output: str, steps: int, updates: int | None, metric: str | None, last: bool) -> None:
    """Make a policy directory OUT of a CHECKPOINT file that the public Diffusion Policy code wrote.

    Nothing in the file is run, and none of that code is needed. Weights (the averaged ones where the config says so), sizes,
    sampler and normaliser are those of the file; a policy that we do not know in full is refused. Every verb takes the file
    itself, too, and keeps what it made of it.

    A file of weights of the public RDT code (.safetensors, pytorch_model.bin, or what DeepSpeed wrote, .pt) becomes an RDT
    policy with that code's sampler; sizes show in the weights.

    Where CHECKPOINT is a folder, it is one of the paper's authors' schedules (optimal_steps_MODULE_S_METRIC.pkl), and OUT is
    the schedule file to write.

    \b
    Examples:
      blockcache policy convert epoch=0650-test_mean_score=1.000.ckpt my_policy/
      blockcache policy convert mp_rank_00_model_states.pt my_rdt/
      blockcache policy convert optimal_steps/cosine/ schedule.json -S 10
    """
    if os.path.isdir(source):
        from blockcache.schedule.authors import read_authors_schedule

        schedule = read_authors_schedule(source, steps=steps, updates=updates, metric=metric, last=last)
        check_writable(output)
        schedule.save(output)
        click.echo(
            f"{output}: {len(schedule.blocks)} blocks x {schedule.steps} steps, {schedule.reused_share:.1%} reused"
        )
        return
    if options := arg.given(["steps", "updates", "metric", "last"]):
        raise click.UsageError(f"{', '.join(options)} is for a folder of schedules; {source} is none")

    if source.endswith(WEIGHT_FILES):
        _convert_rdt(source, output)
        return

    from blockcache.models.dpt.convert import convert_checkpoint

    policy = convert_checkpoint(source, output)
    config = policy.config
    size = sum(entry.stat().st_size for entry in os.scandir(output))
    cameras = f", cameras {', '.join(config.cameras)}" if config.cameras else ""
    click.echo(
        f"{output}: DP-T, {config.n_layer} layers x {config.n_emb}, {config.n_head} heads, horizon {config.horizon}"
        f"{cameras}, {config.sampler.num_inference_steps} {config.sampler.type} steps, {config.weights} weights; "
        f"{size / 1e6:.1f} MB"
    )
    trained = getattr(config.sampler, "num_train_timesteps", None)
    if config.sampler.type == "ddpm" and config.sampler.num_inference_steps != trained:
        click.echo(
            "note: fewer DDPM steps than in training are done as diffusers does them today; 0.11.1 did it otherwise"
        )


def _convert_rdt(source: str, output: str) -> None:
    from blockcache.models.rdt.runner import convert_weights

    config = convert_weights(source, output).config
    size = sum(entry.stat().st_size for entry in os.scandir(output))
    click.echo(
        f"{output}: RDT, {config.depth} layers x {config.hidden_size}, {config.num_heads} heads, horizon {config.horizon}, "
        f"{config.sampler.num_inference_steps} {config.sampler.type} steps; {size / 1e6:.1f} MB"
    )
    click.echo(
        "note: weights do not tell how norms divide; this is as timm 1.0.3 does it without Apex (norm in config.json)"
    )
