#!/usr/bin/env bash
# Fixes three faults of installed packages, in place. None is needed for what this recipe installs; they are for older
# SGLang versions, and for other programs that use the same verl.
#
#   apply.sh [--check|--dry-run|--revert] [--python PYTHON] [NAME...]
#
#   --check     say for each patch whether it is needed; exit 1 if one is
#   --dry-run   print the change as a diff, change nothing
#   --revert    undo: the files are byte for byte what they were
#   --python    interpreter of the environment whose packages are meant (default: python)
#   NAME        dict-chat-template, ref-offload, flush-cache (default: all)
#
# A patch is a set of whole lines and what each becomes; indentation stays. It is applied once, however often this is called,
# and only where every line stands as in the versions that it was written for.
set -euo pipefail

names=(dict-chat-template ref-offload flush-cache)

# describe NAME: sets package, versions and about.
# edits NAME VARIANT: prints one edit a line, FILE <tab> INDENT <tab> OLD <tab> NEW; INDENT is a sed expression. A variant is
# the edits of one file, which belong together. Each file that is there is patched; where several variants are for one file, the
# first counts of which a line stands in it. An edit whose NEW is "-" changes nothing: its line must stand there for the variant
# to count.
describe() {
  case $1 in
    dict-chat-template)
      package=sglang versions="to 0.5.11; fixed from 0.5.12 on (sglang pull request 17236)"
      about="a chat template that is a dict (tool-calling models) crashes the server at its start"
      variants=(once) ;;
    ref-offload)
      package=verl versions="to 0.9.1 (verl pull request 7182 is open)"
      about="the reference policy is offloaded whatever param_offload says; this recipe needs no patch (verl_ext/engines.py), other programs on verl do"
      variants=(engine workers) ;;
    flush-cache)
      package=sglang versions="to 0.5.12; 0.5.23 reports the failure"
      about="a cache that cannot be flushed after an update kills the server; patched, the update fails and, from 0.5.6 on, the \
server stays paused: nothing is generated with keys of the old weights"
      variants=(function inline) ;;
    *) echo "unknown patch $1; choose from: ${names[*]}" >&2; exit 2 ;;
  esac
}

edits() {
  local mark="  # patched: $1" tab=$'\t' any=' *'
  local failed='(False, "Cache flush failed after updating weights; generate nothing before the running requests are ended and the update is repeated")'
  case $1/$2 in
    dict-chat-template/once)
      printf '%s\n' "srt/managers/template_manager.py$tab$any${tab}has_reasoning = re.search(force_reasoning_pattern, template) is not None${tab}has_reasoning = isinstance(template, str) and re.search(force_reasoning_pattern, template) is not None$mark" ;;
    ref-offload/engine)
      local file=workers/engine/fsdp/transformer_impl.py
      printf '%s\n' "$file$tab            ${tab}if self.engine_config.forward_only:${tab}if self.engine_config.forward_only and self.engine_config.param_offload:$mark" \
        "$file$tab            ${tab}if self.engine_config.offload_policy or self.engine_config.forward_only:${tab}if self.engine_config.offload_policy or (self.engine_config.forward_only and self.engine_config.param_offload):$mark" ;;
    ref-offload/workers)
      local file=workers/fsdp_workers.py offload='if getattr(fsdp_config, "param_offload", False) else None'
      printf '%s\n' "$file$tab$any${tab}cpu_offload = None if role == \"actor\" else CPUOffload(offload_params=True)${tab}cpu_offload = None if role == \"actor\" else (CPUOffload(offload_params=True) $offload)$mark" \
        "$file$tab$any${tab}cpu_offload = None if role == \"actor\" else CPUOffloadPolicy(pin_memory=True)${tab}cpu_offload = None if role == \"actor\" else (CPUOffloadPolicy(pin_memory=True) $offload)$mark" ;;
    flush-cache/function)
      local file=srt/managers/scheduler_update_weights_mixin.py
      printf '%s\n' "$file$tab    ${tab}def flush_cache_after_weight_update(self: Scheduler, recv_req) -> None:$tab-" \
        "$file$tab            ${tab}self.flush_cache_after_weight_update(recv_req)${tab}success, message = (success, message) if self.flush_cache_after_weight_update(recv_req) is not False else $failed$mark" \
        "$file$tab            ${tab}assert flush_cache_success, \"Cache flush failed after updating weights\"${tab}self._engine_paused = self._engine_paused or not flush_cache_success; return bool(flush_cache_success)$mark" ;;
    flush-cache/inline) # to 0.5.5 a scheduler cannot be paused, and has no _engine_paused
      printf '%s\n' "srt/managers/scheduler_update_weights_mixin.py$tab$any${tab}assert flush_cache_success, \"Cache flush failed after updating weights\"${tab}self._engine_paused, success, message = (getattr(self, \"_engine_paused\", False), success, message) if flush_cache_success else (True, *$failed)$mark" ;;
  esac
}

escape_old() { printf '%s' "$1" | sed 's/[][\.*^$/]/\\&/g'; }
escape_new() { printf '%s' "$1" | sed 's/[\&/]/\\&/g'; }

# count FILE INDENT LINE
count() { grep -c "^$2$(escape_old "$3")\$" "$1" || true; }

# change NAME VARIANT FORWARD OUT: the patched (FORWARD=1) or restored (0) text of target, into OUT
change() {
  local script="" file indent old new from to
  while IFS=$'\t' read -r file indent old new; do
    if [ "$new" = - ]; then continue; fi
    if [ "$3" = 1 ]; then from=$old to=$new; else from=$new to=$old; fi
    script+="s/^\\($indent\\)$(escape_old "$from")\$/\\1$(escape_new "$to")/"$'\n'
  done < <(edits "$1" "$2")
  sed "$script" "$target" > "$4"
}

# state NAME VARIANT FOLDER: sets target and state (absent|needed|applied|foreign)
state() {
  local file indent old new plain=0 patched=0 total=0
  state=absent
  while IFS=$'\t' read -r file indent old new; do
    target=$3/$file
    [ -f "$target" ] || return 0
    if [ "$new" = - ]; then
      [ "$(count "$target" "$indent" "$old")" != 0 ] || return 0
      continue
    fi
    total=$((total + 1))
    [ "$(count "$target" "$indent" "$old")" = 0 ] || plain=$((plain + 1))
    [ "$(count "$target" "$indent" "$new")" = 0 ] || patched=$((patched + 1))
  done < <(edits "$1" "$2")
  if [ "$plain" = "$total" ]; then
    state=needed
  elif [ "$patched" = "$total" ] && [ "$plain" = 0 ]; then
    state=applied
  elif [ $((plain + patched)) -gt 0 ]; then
    state=foreign
  fi
}

action=apply python=${PYTHON:-python} chosen=()
while [ $# -gt 0 ]; do
  case $1 in
    --check) action=check ;;
    --dry-run) action=dry-run ;;
    --revert) action=revert ;;
    --python) shift; python=${1:?--python needs an interpreter} ;;
    -h|--help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "unknown option $1; see --help" >&2; exit 2 ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${names[@]}")
command -v "$python" > /dev/null || { echo "no interpreter $python; give --python PYTHON" >&2; exit 2; }

needed=0
for name in "${chosen[@]}"; do
  describe "$name"
  read -r version folder < <("$python" - "$package" <<'PYTHON'
import importlib.metadata, importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
if spec is None or not spec.submodule_search_locations:
    print("none none")
else:
    print(importlib.metadata.version(sys.argv[1]), list(spec.submodule_search_locations)[0])
PYTHON
  )
  echo "$name: $about"
  echo "  for $package $versions"
  if [ "$version" = none ]; then
    echo "  $package is not installed for $python: nothing to do"
    continue
  fi
  found=()
  for variant in "${variants[@]}"; do
    state "$name" "$variant" "$folder"
    if [ "$state" = absent ] || [[ " ${found[*]} " = *" $target "* ]]; then continue; fi
    found+=("$target")
    place="$package $version: ${target#"$folder"/}"
    if [ "$state" = foreign ]; then
      echo "  $package $version: $target has only some of the lines; it was changed by someone else: reinstall $package" >&2
      exit 1
    fi
    case $action/$state in
      check/needed) echo "  $place: needed"; needed=1 ;;
      */applied) [ "$action" = revert ] || echo "  $place: applied" ;;
      revert/needed) echo "  $place: not applied" ;;
    esac
    case $action/$state in apply/needed|dry-run/needed|revert/applied) ;; *) continue ;; esac
    changed=$(mktemp)
    change "$name" "$variant" "$([ "$action" = revert ] && echo 0 || echo 1)" "$changed"
    if [ "$action" = dry-run ]; then
      diff -u "$target" "$changed" | sed 's/^/  /' || true
    else
      cat "$changed" > "$target" # keeps owner and mode
      echo "  $place: $([ "$action" = revert ] && echo reverted || echo patched)"
    fi
    rm -f "$changed"
  done
  if [ ${#found[@]} = 0 ]; then echo "  $package $version: not needed, its code has changed"; fi
done
exit $needed
