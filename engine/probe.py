"""`python -P -m engine.probe PORT_VARIABLE PATH [COUNT_VARIABLE]`: a container's health check.

Asks the server in the same container, on the port that the environment variable names, or those on
as many ports as the other one says, and ends with 0 if all answer 200. Certificates are not
checked: they are made out for the outside.
"""

import http.client
import os
import sys

_TIMEOUT = 5.0


def probe(port: int, path: str, *, tls: bool) -> tuple[bool, str]:
    """Return whether GET `path` is answered with 200, and the answer or why there is none."""
    connection: http.client.HTTPConnection
    if tls:
        import ssl  # slow to import

        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=_TIMEOUT, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status == 200, answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return False, str(error)
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Probe as the arguments say and return the exit code."""
    variable, path, *count = arguments
    number = int(os.environ.get(count[0]) or 1) if count else 1
    # Only the API server has certificates.
    tls = variable == "SWELL_PORT" and bool(os.environ.get("SWELL_SSL_CERTFILE"))
    first = int(os.environ[variable])
    answers = [probe(port, path, tls=tls) for port in range(first, first + number)]
    print("; ".join(text for _, text in answers))
    return 0 if all(healthy for healthy, _ in answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
