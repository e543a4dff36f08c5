"""`kvcompile push`."""

from pathlib import Path

import click

from kvcompile.export.push import push


@click.command("push")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make the repository private, if it is made now.")
@click.option("--revision", metavar="BRANCH", help="Branch to commit to, made where there is none  [default: main].")
@click.option("--message", help="Commit message.")
def push_command(artifact: Path, repo: str, private: bool, revision: str | None, message: str | None) -> None:
    """Upload ARTIFACT to the Hugging Face model repository REPO (owner/name).

    The token is the one that `hf auth login` or HF_TOKEN gave; HF_ENDPOINT names another server.

    \b
    Example:
      kvcompile push out/ me/my-model-kvc-int2 --private
    """
    address = push(artifact, repo, private=private, revision=revision, message=message)
    click.echo(f"pushed {artifact} to {address}")
