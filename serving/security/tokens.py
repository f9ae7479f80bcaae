"""Bearer tokens: who may ask, from a file that is read again when it changes."""

import hmac
import logging
from pathlib import Path

from sharp.serving.api.errors import InputError, UnauthenticatedError
from sharp.serving.config import ServerConfig
from sharp.serving.security.file_signature import signature

logger = logging.getLogger(__name__)

SCHEME = "bearer "


class Tokens:
    """The tokens of a file: one a line; empty lines and lines that start with # are left out."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InputError: there is no such file, or no token in it, or one with white space or other than ASCII.
        """
        self._path: Path | None = path
        self._signature: object = signature([path])
        self._tokens = _read(path)

    @classmethod
    def of_key(cls, key: str) -> "Tokens":
        """The one token `key`, without a file.

        Raises:
            InputError: it is empty, or has white space or other than ASCII.
        """
        if not key or not key.isascii() or len(key.split()) != 1:
            raise InputError("api_key cannot be sent: it must be ASCII without spaces, and not empty")
        tokens = cls.__new__(cls)
        tokens._path, tokens._signature, tokens._tokens = None, None, (key.encode(),)
        return tokens

    def check(self, authorization: str | None) -> None:
        """Check the value of an `authorization` header.

        Raises:
            UnauthenticatedError: it does not hold one of the tokens.
        """
        if authorization is None:
            raise UnauthenticatedError("this server asks for a token; send it as 'authorization: Bearer TOKEN'")
        given = authorization[len(SCHEME) :].strip() if authorization.lower().startswith(SCHEME) else ""
        # All of them, always: the time must not tell which one it is.
        if True not in {hmac.compare_digest(given.encode(), token) for token in self._newest()}:
            raise UnauthenticatedError("the token is not one that this server knows; ask whoever runs it for one")

    def _newest(self) -> tuple[bytes, ...]:
        if self._path is None:
            return self._tokens
        now = signature([self._path])
        if now != self._signature:
            self._signature = now
            try:
                self._tokens = _read(self._path)
                logger.info("tokens: %s was read again", self._path)
            except InputError as error:
                logger.warning("tokens: %s; the old ones still count", error)
        return self._tokens


def tokens_of(config: ServerConfig) -> Tokens | None:
    """Those of a server; None without authentication.

    Raises:
        InputError: they cannot be used.
    """
    if config.api_key is not None and config.token_file is not None:
        raise InputError("api_key and token_file are both set; set one of them")
    if config.api_key is not None:
        return Tokens.of_key(config.api_key)
    return None if config.token_file is None else Tokens(config.token_file)


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the token file {path} cannot be read; it must be text with one token a line") from error
    tokens = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not tokens:
        raise InputError(f"the token file {path} holds no token; write one a line")
    for number, token in enumerate(tokens, 1):
        if not token.isascii() or len(token.split()) > 1:
            raise InputError(f"token {number} in {path} cannot be sent: it must be ASCII without spaces")
    return tuple(token.encode() for token in tokens)
