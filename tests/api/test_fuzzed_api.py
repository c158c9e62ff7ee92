"""schemathesis against the OpenAPI: whatever is sent, no 5xx."""

import pytest
from api_testing import ENV, REGISTRATION, memory_app
from hypothesis import HealthCheck, settings
from starlette.testclient import TestClient

schemathesis = pytest.importorskip("schemathesis")

APP = memory_app()
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(autouse=True)
def run():
    with TestClient(APP, base_url="http://localhost") as client:
        client.get("/reset_data")
        client.post("/register", json=REGISTRATION)
        client.get("/batch")
        client.post("/register-env", json=ENV)
        yield


@schema.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case):
    response = case.call()
    assert response.status_code < 500, response.text
