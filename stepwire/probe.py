"""``python -m stepwire.probe [ADDRESS] [--service NAME]``: exit status 0 when the server says SERVING, else 1."""

from __future__ import annotations

import argparse
import sys

from stepwire.credentials import tls
from stepwire.health import check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stepwire.probe", description=__doc__)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--service", default="", help="a full service name; default: the whole server")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds")
    parser.add_argument("--tls-ca", metavar="FILE", help="use TLS; this PEM says who signed the server")
    args = parser.parse_args()
    status = check(args.address, args.service, args.timeout, tls(args.tls_ca) if args.tls_ca else None)
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
