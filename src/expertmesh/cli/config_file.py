"""`--config run.yaml`: option values from a file, which words of the command line override."""

from collections.abc import Mapping, Sequence
from typing import Any

from expertmesh.config.base import expanded, nearest_name
from expertmesh.config.renamed import current_name
from expertmesh.config.values import shown
from expertmesh.data.encoding import NotTextError, decoded, remedy
from expertmesh.errors import ConfigError, command


def read_config_file(path: str) -> tuple[dict[str, Any], str | None]:
    """Contents of a YAML or JSON file, such as a run's config.json.

    Returns:
        The sections, and the recipe if the file has one ("recipe").
    """
    import yaml

    file = expanded(path)
    try:
        found = _read_yaml(decoded(file.read_bytes()))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: does not exist; check the path") from None
    except NotTextError as error:
        raise ConfigError(f"--config {path}: {error}{remedy(error, '')}") from None
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--config {path}: cannot be read ({reason}); give a text file") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"--config {path}: is no YAML ({reason}); correct it") from None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"--config {path}: holds {shown(found)}, not sections; write for example train: {{steps: 100}}"
        )
    values = dict(found)
    recipe, family = values.pop("recipe", None), values.pop("family", "gpt")
    if ":" in str(family):
        raise ConfigError(
            f"--config {path}: names the family {family}, and a file names no module to import; use --family {family}"
        )
    return values, None if recipe is None else str(recipe)


def _read_yaml(text: str) -> Any:
    """YAML text as plain values; a duplicate name in a section is an error, where PyYAML takes the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := sorted(name for name in set(names) - {"<<"} if names.count(name) > 1):
                raise yaml.YAMLError(f"{twice[0]} is given twice")
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def flat_values(
    values: Mapping[Any, Any],  # values of `read_config_file`, or of a section in them
    names: Sequence[str],  # dotted names of all options
    path: str,  # path of the file, for messages
    prefix: str = "",  # prefix of the names in the section, with a dot
    *,
    verb: str = "train",  # name of the verb, for messages
) -> dict[str, Any]:
    """Values by dotted name, from nested or dotted sections."""
    found: dict[str, Any] = {}
    sections = {name.rpartition(".")[0] for name in names if "." in name}
    for key, value in values.items():
        name = current_name(f"{prefix}{str(key).replace('-', '_')}")
        read: dict[str, Any] = {}
        if name in names:
            read = {name: tuple(value) if isinstance(value, list) else value}
        elif not (inside := sorted(known for known in names if known.startswith(f"{name}."))):
            known = sections if isinstance(value, Mapping) else names
            near = nearest_name(name, sorted(known))
            fix = f"did you mean {near}?" if near else f"see {command(f'{verb} --help')}"
            raise ConfigError(f"--config {path}: unknown option {name}; {fix}")
        elif isinstance(value, Mapping):
            read = flat_values(value, names, path, f"{name}.", verb=verb)
        elif value is not None:
            raise ConfigError(
                f"--config {path}: {name} holds {shown(value)}, and is a section; name a field of it, for example "
                f"{inside[0]}"
            )
        if twice := sorted(read.keys() & found.keys()):
            raise ConfigError(f"--config {path}: {twice[0]} is given twice; give it once")
        found |= read
    return found
