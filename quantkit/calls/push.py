"""Upload a checkpoint to a hub: verified first, with its card, private unless asked otherwise.

The same command resumes: the hub keeps the data it has received, and huggingface_hub sends only
what is missing.
"""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calls import Notify, Work, silent
from quantkit.errors import CheckpointError, StorageError, UsageError

if TYPE_CHECKING:
    from quantkit.progress import Progress

SHOWN = 5
NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


@dataclass(frozen=True)
class Pushed:
    """What was uploaded, and where it is."""

    folder: Path
    repo: str
    url: str
    is_private: bool
    n_files: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.folder),
            "repo": self.repo,
            "url": self.url,
            "private": self.is_private,
            "files": self.n_files,
            "size_bytes": self.size_bytes,
        }


@dataclass(frozen=True)
class Push:
    """One call of `push`."""

    folder: Path
    repo: str
    public: bool = False
    revision: str | None = None
    trust_remote_code: bool = False

    needs_hub = True
    needs_transformers = True

    def ready(self, notify: Notify = silent) -> "Work[Pushed]":
        """Refuse a name that cannot be a repository, and a folder that is not a complete
        checkpoint.
        """
        from quantkit.export.manifest import Manifest
        from quantkit.model.description import README

        if not NAME.fullmatch(self.repo):
            raise UsageError(f"'{self.repo}' is not a repository; write ORG/NAME")
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
            raise StorageError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
        Manifest.read(self.folder).require_whole(self.folder)
        if not (self.folder / README).is_file():
            raise CheckpointError(
                f"{self.folder} has no {README}; `quantkit card {self.folder}` writes its card"
            )
        return self._work

    def _work(self, progress: "Progress") -> Pushed:
        from quantkit.verification.folder import verify

        result = verify(self.folder, None, progress, self.trust_remote_code)
        if not result.ok:
            faults = "\n".join(f"  {fault}" for fault in result.faults[:SHOWN])
            raise CheckpointError(
                f"{self.folder} is not uploaded: it failed verification:\n{faults}"
            )
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        with _errors_of_the_hub(self.repo):
            url, is_private = self._upload(files, progress)
        return Pushed(self.folder, self.repo, url, is_private, len(files), size)

    def _upload(self, files: list[Path], progress: "Progress") -> tuple[str, bool]:
        """URL of the files, and whether it is private: an existing repository stays as it is."""
        from huggingface_hub import HfApi

        from quantkit.quiet import only_errors

        api = HfApi()
        url = str(api.create_repo(self.repo, private=not self.public, exist_ok=True))
        is_private = bool(api.model_info(self.repo).private)
        kind = "private" if is_private else "public"
        progress.note(
            f"uploading {len(files)} files to {url}, which is {kind}; the same command resumes"
        )
        with only_errors("huggingface_hub"):
            api.upload_folder(
                repo_id=self.repo,
                folder_path=self.folder,
                repo_type="model",
                revision=self.revision,
                allow_patterns=[glob.escape(file.name) for file in files],
                commit_message=f"Upload {self.folder.name}",
            )
        return url, is_private


@contextmanager
def _errors_of_the_hub(repo: str) -> Iterator[None]:
    """Turn the hub's errors into one sentence."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    # Without a connection, requests raise the error of whichever HTTP library this release of
    # huggingface_hub uses: the base of its own. Uploads of large files raise RuntimeError.
    no_answer: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise StorageError(
            f"cannot upload to {repo}: no hub login; run `hf auth login`, or set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise StorageError(
                f"cannot upload to {repo}: the hub refuses this login (HTTP {status}); check "
                "`hf auth whoami` and that the token may write there"
            ) from error
        first = str(error).strip().splitlines()[0]
        raise StorageError(
            f"cannot upload to {repo}: {first}; run the same command again to resume"
        ) from error
    except (no_answer, OSError, RuntimeError) as error:
        is_lost = isinstance(error, (no_answer, ConnectionError, TimeoutError))
        why = f"no answer from the hub ({error})" if is_lost else str(error)
        raise StorageError(
            f"cannot upload to {repo}: {why}; run the same command again to resume"
        ) from error
