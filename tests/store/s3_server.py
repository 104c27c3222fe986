"""An S3 server on loopback, with faults that the name of a bucket or object asks for. Prints its port; ends with its input.

Bucket `no-conditions` does not know If-None-Match. Objects: `lost-answer`: written, but the first answer is an error;
`refused-part`: the second part is refused; `overloaded`: every request fails.
"""

from __future__ import annotations

import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response


class Faults:
    """The moto application, with faults; requests with a condition run one after the other, as on S3."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()
        self._lost: set[str] = set()

    def __call__(self, environ, start_response):
        request = Request(environ)
        if request.path.startswith("/no-conditions/"):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if "overloaded" in request.path:
            return error("SlowDown", 503)(environ, start_response)
        if "refused-part" in request.path and request.args.get("partNumber") == "2":
            return error("AccessDenied", 403)(environ, start_response)
        if "lost-answer" in request.path and self._is_last_step(request):
            return self._lose_answer(environ, start_response, request.path)
        if "HTTP_IF_NONE_MATCH" in environ:
            with self._one_at_a_time:
                return list(self._app(environ, start_response))
        return self._app(environ, start_response)

    def _is_last_step(self, request: Request) -> bool:
        is_put = request.method == "PUT" and "partNumber" not in request.args
        return is_put or (request.method == "POST" and "uploadId" in request.args)

    def _lose_answer(self, environ, start_response, path: str):
        if path in self._lost:
            return self._app(environ, start_response)
        self._lost.add(path)
        list(self._app(environ, lambda status, headers, exc_info=None: None))
        return error("InternalError", 500)(environ, start_response)


class Quiet(MotoRequestHandler):
    def log_request(self, *arguments) -> None:
        pass


def error(code: str, status: int) -> Response:
    body = f"<Error><Code>{code}</Code><Message>as the test asked</Message></Error>"
    return Response(body, status=status, content_type="application/xml")


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, Faults(), threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
