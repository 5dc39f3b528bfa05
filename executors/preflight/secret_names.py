"""Recognises a secret by its file's name or text, so that a launch does not send it: a run's files are not encrypted.

    slack_token.txt ─words─▶ "slack token", data ─▶ ends with a token, and no model's word stands before ─▶ a secret
    token_utils.py  ─words─▶ "token utils", code ─▶ ends with utils                                      ─▶ code
    HFtoken.TXT     ─words─▶ "h ftoken", and joined "hftoken" ─▶ the joined word is a service's token    ─▶ a secret

The last word of a name tells the kind of the thing: `db_credentials` are credentials, `credentials_check` is a check.
A token is a secret if its owner is a service (`hf_token.py`), and in a data file also if its owner is unknown; other
tokens are a model's. A key is a secret if its owner is a service.

OLDER has the patterns of an earlier release. A name that they match is a secret, too, unless the name is a template's.

A small file is a secret by its text if it has a private key (as Google's downloads, my-project-1234-ab12.json), or a
service's key in its documented form.

Not promised: a secret of another name, language and form, or a module `acme_token.py` of a service that we do not
know.
"""

import re
import unicodedata
from pathlib import Path

KEY_FILE = re.compile(
    r"\.env.*|.*\.env|\.(netrc|npmrc|pypirc|pgpass|htpasswd)|kaggle\.json|.*\.(token|pem|key|p12|pfx)",
    re.I,
)
SSH_KEY = re.compile(r"id_(rsa|dsa|ecdsa|ed25519).*", re.I)
OWNED = r"((my|our|hf|hub|huggingface|gh|github|gitlab|wandb|openai|anthropic|aws|api|access|auth|refresh)[._-]?)"
SECRET = "secret(?!ar|ion|ory)"  # not secretary.csv, nor secretion.json
OLDER = re.compile(rf"credentials.*|.*{SECRET}.*|service_account.*|\.?{OWNED}*token(\.(txt|json))?", re.I)
OLDER_CODE = re.compile(rf"(?!tokens\.){OWNED}*(secrets?|credentials?|tokens?|api_?keys?|passwords?)\.py", re.I)
TEMPLATE = re.compile(r".+ (example|sample|template|dist)")  # .env.example, secrets_template.py: no values
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+")
TEXTS = {"txt", "json", "yaml", "yml", "toml", "ini", "cfg", "conf"}
KEPT = r"(secrets?|credentials?|creds|passwords?|passwd|passphrases?|(api|access|private|secret) ?keys?)"
STAGE = (  # the last pattern: any word without ASCII letters
    r"( (local|dev|staging|prod|production|private|backup|old|copy|kopie|[^ -~]+))*"
)
SERVICE = (
    r"((my|our|team|hf|hub|huggingface|gh|github|gitlab|wandb|kaggle|openai|anthropic|aws|slack|discord|telegram|stripe"
    r"|bot|read|write|api|access|auth|bearer|refresh) ?)"
)
GIVES_KEYS = r"(github|gitlab|wandb|kaggle|openai|anthropic|openrouter|groq|runpod|aws|azure|gcp|slack|stripe)"
VERB = r"(get|set|load|read|save|write|make|check|detect|find|scan|test|hide|mask|strip|filter|redact|no)"
MODEL = (
    r"(special|added|extra|new|next|previous|first|last|bos|eos|pad|unk|sep|cls|mask|stop|start|end|think|image"
    r"|sub|pre)"
)
CODE = re.compile(
    rf"(?!{VERB}( |{KEPT}|tokens?))(.*{KEPT}|{SERVICE}*token|{SERVICE}+tokens|(.* )?{SERVICE}*{GIVES_KEYS} ?keys?)"
    rf"{STAGE}"
)
DATA = re.compile(
    rf".*({SECRET}|credentials|service ?account).*|.*credential( .*)?|.*{KEPT}{STAGE}"
    rf"|(?!(.* )?{MODEL} ?token).*token{STAGE}|{SERVICE}+tokens{STAGE}|(.* )?({GIVES_KEYS} ?|{SERVICE})keys?{STAGE}"
    rf"|((?!keyboard).*access ?keys?|rootkey){STAGE} csv"  # AWS's downloads
)
SMALL = 1 << 16  # bytes: a larger file is data, which may quote a key
FORMS = re.compile(
    rb"-----BEGIN ([A-Z]+ )*PRIVATE KEY-----|\b(hf_[A-Za-z]{30,}|gh[opsu]_\w{36,}|github_pat_\w{50,}|glpat-[\w-]{20,}"
    rb"|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}(?<!EXAMPLE)|AIza[\w-]{35}|xox[abps]-[\w-]{20,})"
)


def holds_secret(file: Path) -> bool:
    """Whether a small file's text has a private key, or a service's key."""
    try:
        return file.stat().st_size <= SMALL and FORMS.search(file.read_bytes()) is not None
    except OSError:
        return False


def is_secret(path: str) -> bool:
    """Whether a file, or a folder above it, has the name of a secret.   path: "conf/slack_token.txt"."""
    *folders, name = path.split("/")
    if any(CODE.fullmatch(words) for folder in folders for words in _readings(folder)):
        return True
    stem, _, ending = name.rpartition(".")
    is_code = ending.lower() == "py"
    readings = _readings(stem if is_code or ending.lower() in TEXTS else name)
    if SSH_KEY.fullmatch(name):
        return True
    if any(TEMPLATE.fullmatch(words) for words in readings):
        return False
    if KEY_FILE.fullmatch(name) or (OLDER_CODE if is_code else OLDER).fullmatch(name):
        return True
    return any((CODE if is_code else DATA).fullmatch(words) for words in readings)


def _readings(name: str) -> set[str]:
    """Return {"db credentials", "dbcredentials"} for "dbCredentials": "HFtoken" matches only in its joined form.

    Accents do not count."""
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    return {" ".join(WORD.findall(text)).lower() for text in (plain, plain.lower())}
