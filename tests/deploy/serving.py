"""Judges a Ray Serve configuration as `serve deploy` and the build task would, without a cluster."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from services.app import AppArgs, build, config_from
from services.live_config import with_live


@contextmanager
def environment(**values: str) -> Any:
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


SECRETS = {"PDRAY_SECRET": "s" * 48, "PDRAY_REDIS__URL": "redis://:pw@valkey:6379/0"}


def check_serve_config(config: Mapping[str, Any], environ: Mapping[str, str] = SECRETS) -> set[str]:
    """Names of the deployments that the configuration makes; raises where Serve or pdray would refuse it.

    Builds the application from the arguments, as a pod of the chart would: secret and Redis come from the environment.
    """
    schema = ServeDeploySchema.model_validate(config)
    (app,) = schema.applications
    module, _, name = app.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is build
    for function in schema.grpc_options.grpc_servicer_functions:
        path, _, leaf = function.rpartition(".")
        assert callable(getattr(importlib.import_module(path), leaf))
    with environment(**environ):
        args = AppArgs(**app.args)
        built = build_app(build(args), name=app.name)
        for deployment in app.deployments:
            if isinstance(deployment.user_config, Mapping):
                assert deployment.name == "router"
                with_live(config_from(args), deployment.user_config)
    made = {d.name for d in built.deployments}
    assert {d.name for d in app.deployments} <= made, "Serve refuses options of a deployment that does not exist"
    return made
