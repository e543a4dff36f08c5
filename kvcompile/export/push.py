"""`kvcompile push`: an artifact to the Hugging Face Hub."""

import re
from pathlib import Path

from kvcompile.artifact import MANIFEST_NAME, SIDECAR_NAME, open_artifact
from kvcompile.checkpoint import Checkpoint
from kvcompile.checkpoint.reader import INDEX_NAME
from kvcompile.errors import ArtifactError, ExportError
from kvcompile.evaluate import verify

STALE = ("model.safetensors", "model-*-of-*.safetensors", INDEX_NAME)
"""Patterns of weights that an earlier push may have left; loaders would take them for this artifact's."""
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def push(
    out: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload the artifact `out` to the model repository `repo` (``owner/name``), made where there is none; its address.

    Only the artifact's own files go up, in one commit, after its hashes have been checked; the same commit removes weights of
    an earlier push that are not among them (`STALE`), and no other file. `token` and `endpoint` default to
    what huggingface_hub finds (``hf auth login``, HF_TOKEN, HF_ENDPOINT). Raises ExportError in one sentence, never with the
    token in it; ArtifactError or VerificationError for an artifact that is not whole.
    """
    from huggingface_hub import HfApi, get_token

    if not _REPO.fullmatch(repo):
        raise ExportError(f"'{repo}' names no repository of the Hugging Face Hub; write owner/name")
    out = Path(out)
    artifact = open_artifact(out)
    if artifact.manifest.weights.mode == "overlay":
        raise ArtifactError(f"{out} is an overlay, which names a local path for its weights; push a folded artifact")
    verify(out)
    checkpoint = Checkpoint(out)
    names = [file.name for file in (*checkpoint.shards, *checkpoint.companions())]
    names += [MANIFEST_NAME, SIDECAR_NAME, INDEX_NAME, "README.md", "report.html"]
    secret = token or get_token()
    if not secret:
        raise ExportError("there is no token for the Hugging Face Hub; run 'hf auth login' or set HF_TOKEN")
    if not (secret.isascii() and secret.isprintable()):
        raise ExportError(
            "the token for the Hugging Face Hub has characters that no token has; copy it again, into HF_TOKEN or 'hf auth login'"
        )
    api = HfApi(endpoint=endpoint, token=secret)
    try:
        address = api.create_repo(repo, private=private, exist_ok=True, repo_type="model")
        if revision is not None:
            api.create_branch(address.repo_id, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=out,
            allow_patterns=names,
            delete_patterns=list(STALE),
            revision=revision,
            commit_message=message or f"kvcompile {artifact.manifest.scheme.name}",
        )
    except Exception as error:  # the hub client raises many kinds; to the user they are one
        raise ExportError(f"cannot push {out} to {repo}: {_reason(error, secret)}") from None
    return str(address)


def _reason(error: Exception, secret: str) -> str:
    """Why the Hub refused, in words of ours where the status says enough; without the token."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the Hub does not accept the token; run 'hf auth login' again"
    if status == 403:
        return "the token may not write there; use one with write access to this repository"
    if status == 409:
        return "somebody else is changing this repository; try again when they are done"
    if isinstance(error, LookupError | TypeError):
        return "the server does not answer as the Hugging Face Hub does; look at HF_ENDPOINT"
    lines = [line.strip() for line in str(error).replace(secret, "***").splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
