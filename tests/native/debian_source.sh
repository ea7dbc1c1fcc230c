# A function for scripts that compile sources of Debian. Scripts read this file with `source`.

# fetch FOLDER SUITE:PACKAGE ... downloads the source of the first of these packages that the mirror
# has, and prints the path of the archive. The mirror is that of this machine's settings of apt. The
# other settings and the lists are those of the folder.
fetch() {
    local folder=$1 mirror options suite package
    shift
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -1)
    mkdir -p "$folder/lists/partial"
    options="-q -o Dir::Etc::sourcelist=$folder/sources.list -o Dir::Etc::sourceparts=-
        -o Dir::State::lists=$folder/lists -o APT::Sandbox::User=root"
    for package in "$@"; do
        suite=${package%:*} package=${package#*:}
        echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
            "$mirror $suite main" > "$folder/sources.list"
        if apt-get $options update > /dev/null \
            && (cd "$folder" && apt-get $options source --tar-only --download-only \
                "$package/$suite") > /dev/null 2>&1; then
            echo "$folder/$package"*.orig.tar.*
            return
        fi
        echo "The mirror has no source of $package in $suite." >&2
    done
    return 1
}
