"""Models, as OpenAI's API has them."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from batchinfer.api.deps import Service
from batchinfer.api.schemas import ErrorBody
from batchinfer.jobs.models import find_model
from batchinfer.jobs.openai_views import ModelList, ModelObject

_ERRORS: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "No such model."}}

router = APIRouter(prefix="/v1/models", tags=["openai"], responses=_ERRORS)


@router.get("")
def list_models(service: Service, request: Request) -> ModelList:
    """List models: those of the server's settings, of workers alive, of recent jobs. Others may be named as well."""
    return service.models(request.app.state.settings.models)


@router.get("/{model:path}")
def get_model(
    model: Annotated[str, Path(description="Name of a model; may hold slashes.")], service: Service, request: Request
) -> ModelObject:
    """Look at a model."""
    return find_model(service.models(request.app.state.settings.models), model)
