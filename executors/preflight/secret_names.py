"""Tells a secret by its file's name, so that a launch leaves it here: a run's files are plain.

    slack_token.txt ─words─▶ "slack token", data ─▶ ends with a token, and no model's word stands before ─▶ a secret
    token_utils.py  ─words─▶ "token utils", code ─▶ ends with utils                                      ─▶ code

The last word says what a thing is: `db_credentials` are credentials, `credentials_check` is a check.  A token is a
secret if its owner is a service (`hf_token.py`), and for data also if its owner is unknown; else it is a model's.

Not promised: a secret in a file of another name, or a module `acme_token.py` of a service that we do not know.
"""

import re

KEY_FILE = re.compile(
    r"\.env.*|.*\.env|\.(netrc|npmrc|pypirc|pgpass|htpasswd)|kaggle\.json|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*\.(token|pem|key|p12|pfx)",
    re.I,
)
TEMPLATE = re.compile(r".+ (example|sample|template|dist)")  # .env.example, secrets_template.py: no values
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
TEXTS = {"txt", "json", "yaml", "yml", "toml", "ini", "cfg", "conf"}
KEPT = r"(secrets?|credentials?|creds|passwords?|passwd|passphrases?|(api|access|private|secret) ?keys?)"
STAGE = r"( (local|dev|staging|prod|production|private|backup|old))*"
SERVICE = (
    r"((my|our|team|hf|hub|huggingface|gh|github|gitlab|wandb|kaggle|openai|anthropic|aws|slack|discord|telegram|stripe"
    r"|bot|read|write|api|access|auth|bearer|refresh) )"
)
VERB = r"(get|set|load|read|save|write|make|check|detect|find|scan|test|hide|mask|strip|filter|redact|no)"
MODEL = r"(special|added|extra|new|next|previous|first|last|bos|eos|pad|unk|sep|cls|mask|stop|start|end|think|image)"
CODE = re.compile(rf"(?!{VERB} )(.*{KEPT}|{SERVICE}*token|{SERVICE}+tokens){STAGE}")
DATA = re.compile(
    rf"(.*(secrets?|credentials?|service ?account)( .*)?|.*{KEPT}{STAGE}"
    rf"|(?!(.* )?{MODEL} token)(.* )?token{STAGE}|{SERVICE}+tokens{STAGE})"
)


def is_secret(path: str) -> bool:
    """Whether a file, or a folder above it, has the name of a secret.   path: "conf/slack_token.txt"."""
    *folders, name = path.split("/")
    if any(CODE.fullmatch(_words(folder)) for folder in folders):
        return True
    stem, _, ending = name.rpartition(".")
    words = _words(stem if ending in TEXTS or ending == "py" else name)
    if TEMPLATE.fullmatch(words):
        return False
    return bool(KEY_FILE.fullmatch(name) or (CODE if ending == "py" else DATA).fullmatch(words))


def _words(name: str) -> str:
    """Return "db credentials" for "db_credentials", "dbCredentials" and "DB-credentials2"."""
    return " ".join(WORD.findall(name)).lower()
