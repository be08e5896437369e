"""What the provider of oidc_provider.py serves, and says of its people. Imported by Django, once it is configured."""

from typing import Any

from django.contrib.auth.views import LoginView
from django.urls import include, path
from oauth2_provider.oauth2_validators import OAuth2Validator

urlpatterns = [
    path("o/", include("oauth2_provider.urls", namespace="oauth2_provider")),
    path("login/", LoginView.as_view()),
]


class Validator(OAuth2Validator):  # type: ignore[misc]
    oidc_claim_scope = None

    def get_additional_claims(self, request: Any) -> dict[str, Any]:
        return {
            "preferred_username": request.user.username,
            "groups": [group.name for group in request.user.groups.all()],
        }
