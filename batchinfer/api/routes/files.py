"""Files, as OpenAI's API has them: upload, list, look, fetch, delete."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from batchinfer.api.deps import Files, Who
from batchinfer.api.multipart import FormReader
from batchinfer.api.schemas import ErrorBody
from batchinfer.errors import InvalidSpecError, NotFoundError, TooLargeError
from batchinfer.jobs.files import Upload, is_file_id
from batchinfer.jobs.ledger_files import FileRecord
from batchinfer.jobs.openai_views import FileDeleted, FileList, FileObject, page

UPLOAD = ("POST", "/v1/files")
MAX_LIST = 10_000
_FORM_BYTES = 64 * 2**10
"""What a form may hold beside its file."""
_DRAINED_BYTES = 64 * 2**20
"""A refused upload is read on for so long, so that its client gets to read the answer."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
    404: {"model": ErrorBody, "description": "No such file."},
    409: {"model": ErrorBody, "description": "A job that has not ended reads the file."},
    413: {"model": ErrorBody, "description": "The file or a line of it is too large."},
}
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch", "input"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}

router = APIRouter(prefix="/v1/files", tags=["openai"], responses=_ERRORS)


def file_object(file: FileRecord) -> FileObject:
    """A file as its clients see it."""
    assert file.created_at is not None
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=int(file.created_at.timestamp()),
        expires_at=None if file.expires_at is None else int(file.expires_at.timestamp()),
        filename=file.filename,
        purpose=file.purpose,
        sha256=file.sha256,
    )


@router.post(
    "", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
)
async def upload_file(
    request: Request,
    files: Files,
    who: Who,
    content_type: Annotated[str | None, Header(include_in_schema=False)] = None,
    content_length: Annotated[int | None, Header(include_in_schema=False)] = None,
) -> FileObject:
    """Upload a file. Purpose `batch` is for request lines (JSONL), `input` for the prompts of a job (Parquet or JSONL).

    The body is stored as it arrives; nothing is kept of an upload that breaks off.
    """
    body = _Body(request, max_bytes=files.max_bytes + _FORM_BYTES)
    upload: Upload | None = None

    def begin(filename: str) -> Upload:
        nonlocal upload
        upload = files.receive(filename)
        return upload

    try:
        body.check_announced(content_length)
        form = FormReader(content_type, begin)
        await form.read(body.chunks())
        assert upload is not None
        purpose, expires_after_s = form.fields.get("purpose", ""), _expiry(form.fields)
        return file_object(await run_in_threadpool(upload.finish, who.home, purpose, expires_after_s=expires_after_s))
    except BaseException:
        if upload is not None:
            await run_in_threadpool(upload.abandon)
        await body.drain()
        raise


def _expiry(fields: dict[str, str]) -> int | None:
    """Seconds that the file is to be kept, or None. Raises InvalidSpecError."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None or not seconds.isdecimal() or len(seconds) > 10:
        raise InvalidSpecError(
            "expires_after needs anchor 'created_at' and whole seconds, as in expires_after[seconds]=86400",
            param="expires_after",
        )
    return int(seconds)


class _Body:
    """A request's body, read once, up to a limit."""

    def __init__(self, request: Request, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._stream = request.stream()
        self._num_bytes = 0

    def check_announced(self, num_bytes: int | None) -> None:
        """Refuse at once what says that it is too large. Raises TooLargeError."""
        if num_bytes is not None and num_bytes > self.max_bytes:
            raise self._too_large()

    def _too_large(self) -> TooLargeError:
        message = f"the form is larger than {self.max_bytes} bytes; split the file, or raise BATCHINFER_MAX_FILE_BYTES"
        return TooLargeError(message, param="file", code="file_too_large")

    async def chunks(self) -> AsyncIterator[bytes]:
        """What arrives. Raises TooLargeError."""
        async for chunk in self._stream:
            self._num_bytes += len(chunk)
            if self._num_bytes > self.max_bytes:
                raise self._too_large()
            yield chunk

    async def drain(self) -> None:
        """Read what is left, within reason, and forget it."""
        drained = 0
        try:
            async for chunk in self._stream:
                drained += len(chunk)
                if drained > _DRAINED_BYTES:
                    return
        except Exception:  # noqa: BLE001 -- the client is gone or the stream was broken off: nothing is left to read
            return


@router.get("")
def list_files(  # noqa: PLR0917 -- FastAPI passes by name
    files: Files,
    who: Who,
    limit: Annotated[int, Query(ge=1, le=MAX_LIST, description="Most items of the page.")] = MAX_LIST,
    after: Annotated[str | None, Query(description="Last id of the page before.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By time of creation.")] = "desc",
    purpose: Annotated[str | None, Query(max_length=20, description="Only files of this purpose.")] = None,
    sha256: Annotated[str | None, Query(max_length=64, description="Only files with these bytes (ours).")] = None,
) -> FileList:
    """List files, newest first."""
    found, has_more = files.list(
        who, purpose=purpose, sha256=sha256, limit=limit, after=None if after is None else _checked(after),
        is_ascending=order == "asc",
    )  # fmt: skip
    return FileList(**page([file_object(file) for file in found], has_more=has_more))


FileId = Annotated[str, Path(description="Id of a file.")]


def _checked(file_id: str) -> str:
    """Text that no id can be never reaches the database. Raises NotFoundError."""
    if not is_file_id(file_id):
        raise NotFoundError("no such file; GET /v1/files lists them", param="file_id")
    return file_id


@router.get("/{file_id}")
def get_file(file_id: FileId, files: Files, who: Who) -> FileObject:
    """Look at a file."""
    return file_object(files.get(who, _checked(file_id)))


@router.get("/{file_id}/content", response_class=StreamingResponse)
def get_file_content(file_id: FileId, files: Files, who: Who) -> StreamingResponse:
    """Fetch a file's bytes."""
    file, chunks = files.read(who, _checked(file_id))
    headers = {
        "Content-Length": str(file.num_bytes),
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(file.filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)


@router.delete("/{file_id}")
def delete_file(file_id: FileId, files: Files, who: Who) -> FileDeleted:
    """Delete a file that no unfinished job reads."""
    files.delete(who, _checked(file_id))
    return FileDeleted(id=file_id)
