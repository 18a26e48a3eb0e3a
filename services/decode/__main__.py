import sys

from services.decode.worker import build
from services.worker.main import main

ROLES = ("decode", "mixed")

if __name__ == "__main__":
    sys.exit(main(build, ROLES))
