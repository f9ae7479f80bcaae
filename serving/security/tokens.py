"""Bearer tokens of the clients that may use the server, from a file that is read again when it changes."""

import hmac
import logging
import stat
from pathlib import Path

from sharp.core.file_watch import signature, watch
from sharp.core.regular_file import read_regular_file
from sharp.serving.api.errors import InputError, UnauthenticatedError
from sharp.serving.config import ServerConfig
from sharp.serving.security.caller import token_name

logger = logging.getLogger(__name__)

SCHEME = "bearer "
MOST_BYTES = 2**20  # of a file of tokens


class Tokens:
    """The tokens of a file, one per line; empty lines and lines that start with # are left out."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InputError: there is no such file, or it has no token, or a token has white space or other than ASCII.
        """
        self._path: Path | None = path
        before = signature(self.watched)
        self._tokens = _read(path)
        watch(self, before)

    @classmethod
    def of_key(cls, key: str) -> "Tokens":
        """Return the tokens that consist of `key` alone, without a file.

        Raises:
            InputError: the key is empty, or has white space or other than ASCII.
        """
        if not key or not key.isascii() or len(key.split()) != 1:
            raise InputError("api_key cannot be sent: it must be ASCII without spaces, and not empty")
        tokens = cls.__new__(cls)
        tokens._path, tokens._tokens = None, (key.encode(),)
        return tokens

    def check(self, authorization: str | None) -> str:
        """Check the value of an `authorization` header, and return the name of its token.

        Raises:
            UnauthenticatedError: the header does not hold one of the tokens.
        """
        if authorization is None:
            raise UnauthenticatedError("this server asks for a token; send it as 'authorization: Bearer TOKEN'")
        given = authorization[len(SCHEME) :].strip() if authorization.lower().startswith(SCHEME) else ""
        # Compare with all tokens always, because the time must not tell which token matches.
        if True not in [hmac.compare_digest(given.encode(), token) for token in self._tokens]:
            raise UnauthenticatedError("the token is not one that this server knows; ask whoever runs it for one")
        return token_name(given.encode())

    @property
    def watched(self) -> tuple[Path, ...]:
        """The file of the tokens; empty if they come from no file."""
        return () if self._path is None else (self._path,)

    def reload(self) -> None:
        """Read the file again. If the file cannot be used, the old tokens stay valid."""
        for path in self.watched:
            try:
                self._tokens = _read(path)
                logger.info("tokens: %s was read again", path)
            except InputError as error:
                logger.warning("tokens: %s; the old ones still count", error)


def tokens_of(config: ServerConfig) -> Tokens | None:
    """Return the tokens of a server; None without authentication.

    Raises:
        InputError: the tokens cannot be used.
    """
    if config.api_key is not None and config.token_file is not None:
        raise InputError("api_key and token_file are both set; set one of them")
    if config.api_key is not None:
        return Tokens.of_key(config.api_key)
    return None if config.token_file is None else Tokens(config.token_file)


def _read(path: Path) -> tuple[bytes, ...]:
    """Return the tokens in a file, one per line without comments. InputError if it has none or cannot be read."""
    try:
        lines = read_regular_file(path, MOST_BYTES).decode().splitlines()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"the token file {path} cannot be read; it must be text with one token a line") from error
    if mode & stat.S_IROTH:
        logger.warning("tokens: every user of this machine can read %s; chmod o-r it", path)
    tokens = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not tokens:
        raise InputError(f"the token file {path} holds no token; write one a line")
    for number, token in enumerate(tokens, 1):
        if not token.isascii() or len(token.split()) > 1:
            raise InputError(f"token {number} in {path} cannot be sent: it must be ASCII without spaces")
    return tuple(token.encode() for token in tokens)
