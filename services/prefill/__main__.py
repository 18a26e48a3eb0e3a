import sys

from services.prefill.worker import build
from services.worker.main import main

ROLES = ("prefill",)

if __name__ == "__main__":
    sys.exit(main(build, ROLES))
