"""GET /openapi.json, and /docs: Swagger UI, whose files come from a package."""

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse

from server.observe.shared_work import SharedWork

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Send the document."""
    document: SharedWork[bytes] = request.app.state.document
    return Response(await document.result(), media_type="application/json")


@router.get("/docs")
async def page(request: Request) -> Response:
    """Show the API's document."""
    root = request.scope.get("root_path", "").rstrip("/")
    return get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title=f"{request.app.title} API",
        swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/swagger-ui.css",
        swagger_favicon_url=f"{root}/docs/favicon.png",
    )


@router.get("/docs/swagger-ui-bundle.js")
@router.get("/docs/swagger-ui.css")
@router.get("/docs/favicon.png")
async def file(request: Request) -> Response:
    """Send a file of the page."""
    folder = Path(str(files("fastapi_offline"))) / "static"
    return FileResponse(folder / Path(request.url.path).name)
